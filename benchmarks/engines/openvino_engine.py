"""OpenVINO GenAI for `millpond bench engines`: its continuous batching, step by step. See engine_child.py.

Runs in an environment of its own (benchmarks/engines/openvino_env.sh).
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy
import openvino
import openvino_genai as genai
from engine_child import serve

BLOCK = 32  #: tokens of one of its blocks on CPUs; eviction counts in whole ones


class OpenVINO:
    """A pipeline over a folder that openvino_model.py made.

    Settings: model, threads; keep: entries per head that eviction leaves, 0 for a full cache; step_tokens: of prompts
    in one step; defaults: its own precisions and scheduling instead of `precision` everywhere.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings["threads"]}
        if not settings["defaults"]:
            scheduler.max_num_batched_tokens = settings["step_tokens"]
            kind = precision()
            properties |= {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}
        if settings["keep"]:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = eviction(settings["keep"])
        self._pipeline = genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self._names = itertools.count()
        self._keep = settings["keep"]

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """One reading: steps until every prompt has its first token, then `new_tokens` more."""
        config = genai.GenerationConfig()
        config.ignore_eos, config.do_sample = True, False
        config.set_eos_token_id(0)  # the model has none, which the pipeline refuses
        config.max_new_tokens = new_tokens + 2 + sum(map(len, prompts)) // BLOCK  # none ends before the last step
        begun = time.perf_counter()
        handles = [
            self._pipeline.add_request(next(self._names), openvino.Tensor(numpy.array([prompt])), config)
            for prompt in prompts
        ]
        waiting = list(handles)
        while waiting:
            self._pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]
        ticks = [time.perf_counter()]
        for _ in range(new_tokens):
            self._pipeline.step()
            ticks.append(time.perf_counter())
        held = self._held(sum(map(len, prompts)) + len(prompts) * new_tokens)
        for handle in handles:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        steps = [1e3 * (after - before) for before, after in itertools.pairwise(ticks)]
        return {"prefill_s": ticks[0] - begun, "steps_ms": steps, "kv_bytes": held}

    def _held(self, tokens: int) -> int:
        """Bytes of the blocks in use: a share of the pool, in percent."""
        metrics = self._pipeline.get_metrics()
        return round(metrics.cache_usage / 100 * metrics.kv_cache_size_in_bytes)


def precision() -> str:
    """bf16 where this CPU multiplies it; else f32, since its paged attention then takes no 16-bit keys and values."""
    return "bf16" if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"


def eviction(keep: int) -> Any:
    """H2O-like eviction to `keep` entries per head, in whole blocks, its first and recent ones as small as may be."""
    blocks = max(3, keep // BLOCK)
    recent = max(1, min(4, blocks - 2))
    mode = genai.AggregationMode.NORM_SUM
    return genai.CacheEvictionConfig(BLOCK, recent * BLOCK, blocks * BLOCK, mode)


if __name__ == "__main__":
    serve(f"openvino-genai {genai.__version__}, openvino {openvino.__version__}, {precision()}", OpenVINO)
