"""Millpond's own engine for `millpond bench engines`, in a process like everyone else's. See engine_child.py."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from engine_child import serve

import millpond
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.models.load import load_model


class Millpond:
    """An engine over a model in bfloat16, or with its matrices in codes.

    Settings: model, threads; method, budget, codec, weights as `millpond.LLM` takes them; step_tokens: of prompts in
    one step.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        model, weights = settings["model"], settings["weights"]
        options = {"method": settings["method"], "budget": settings["budget"], "codec": settings["codec"]}
        options["max_step_tokens"] = settings["step_tokens"]
        if weights is None:
            self._engine = Engine(load_model(model, "bf16"), **options)
        else:
            self._engine = millpond.LLM(model, dtype="bf16", weights=weights, **options).engine
        self._names = itertools.count()

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """One reading: steps until every prompt has its first token, then `new_tokens` more."""
        most = new_tokens + 2 + sum(map(len, prompts)) // 32  # none ends before the last step
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        begun = time.perf_counter()
        names = [str(next(self._names)) for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add(Request(request_id=name, prompt=tuple(prompt), params=params))
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in self._step() if output.completions[0].token_ids}
        ticks = [time.perf_counter()]
        for _ in range(new_tokens):
            self._step()
            ticks.append(time.perf_counter())
        stats = self._engine.stats()
        for name in names:
            self._engine.cancel(name)
        self._engine.drain()
        steps = [1e3 * (after - before) for before, after in itertools.pairwise(ticks)]
        return {
            "prefill_s": ticks[0] - begun,
            "steps_ms": steps,
            "kv_bytes": stats.kv_bytes,
            "weight_bytes": stats.weight_bytes,
        }

    def _step(self) -> list[Any]:
        outputs = self._engine.step()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs


if __name__ == "__main__":
    serve(f"millpond {millpond.__version__}, torch {torch.__version__}", Millpond)
