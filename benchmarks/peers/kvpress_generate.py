"""The kvpress side of `millpond bench generate`: one JSON request per line in, one JSON answer per line out.

Runs in an environment of its own (benchmarks/peers/kvpress_env.sh) and therefore imports nothing of Millpond. The
parent sends the shape of the model, the prompts and the press; the answer holds what the parent measures of every peer:
prefill_s, decode_ms (the median step), kv_bytes (of the buffers that the cache holds) and peak_bytes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
import time
from contextlib import nullcontext, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import kvpress
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

PRESSES = {
    "SnapKV": lambda ratio: kvpress.SnapKVPress(ratio),
    "ObservedAttention": lambda ratio: kvpress.ObservedAttentionPress(ratio),
    "AdaKV(SnapKV)": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
}
NEEDS_EAGER = {"ObservedAttention"}


class Clock(BaseStreamer):
    """Notes when the prompt and each token came."""

    def __init__(self) -> None:
        self.begun, self.times = time.perf_counter(), []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@cache
def build(config: str, seed: int, attention: str) -> Any:
    """The random model in bfloat16, made once per attention."""
    torch.manual_seed(seed)
    settings = LlamaConfig(**json.loads(config))
    settings._attn_implementation = attention
    model = LlamaForCausalLM(settings).to(torch.bfloat16)
    model.train(False)
    return model


def status(field: str) -> int | None:
    """A field of /proc/self/status, in bytes; None where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)


def mark_memory() -> int | None:
    """The resident memory now, from which the peak is counted; None where it cannot be counted."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # else a peak hides in memory that is reused
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return status("VmRSS")


def held(kv: DynamicCache, model: Any) -> int:
    """Bytes of the cache's buffers, and of the indices that a masking press keeps in addition."""
    tensors = [tensor for layer in kv.layers for tensor in (layer.keys, layer.values)]
    for layer in model.model.layers:
        indices = getattr(layer.self_attn, "masked_key_indices", None)
        tensors += [index for index in indices or () if isinstance(index, torch.Tensor)]
    buffers = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(buffers.values())


@torch.inference_mode()
def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run one request."""
    if request.get("hello"):
        return {"versions": f"torch {torch.__version__}, transformers {transformers.__version__}, kvpress {_version()}"}
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    press = request["press"]
    model = build(json.dumps(request["config"]), request["seed"], "eager" if press in NEEDS_EAGER else "sdpa")
    prompts = torch.tensor(request["prompts"])
    kv = DynamicCache(config=model.config)
    context = nullcontext() if press == "none" else PRESSES[press](request["ratio"])(model)
    before, clock = mark_memory(), Clock()
    with context:
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            past_key_values=kv,
            streamer=clock,
            do_sample=False,
            max_new_tokens=request["new_tokens"],
            min_new_tokens=request["new_tokens"],
        )
    first, *_ = tokens = clock.times[1:]
    peak = status("VmHWM")
    reading = {
        "prefill_s": first - clock.begun,
        "decode_ms": 1e3 * statistics.median(b - a for a, b in pairwise(tokens)),
        "kv_bytes": held(kv, model),
        "peak_bytes": max(0, peak - before) if before is not None and peak is not None else None,
    }
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None  # a masking press leaves its indices behind
    return reading


def _version() -> str:
    from importlib.metadata import version

    return version("kvpress")


def main() -> None:
    """Serve until standard input ends; only answers go to standard output."""
    out, sys.stdout = sys.stdout, sys.stderr
    transformers.logging.set_verbosity_error()
    for line in sys.stdin:
        try:
            result = answer(json.loads(line))
        except Exception as error:  # the parent reports it with the others' numbers
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        out.write(json.dumps(result) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
