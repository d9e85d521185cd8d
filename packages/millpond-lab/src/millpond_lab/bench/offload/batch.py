"""One batch of a transformers model in the offloading benchmark, timed."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import torch

from millpond.models.cache_argument import cache_argument, cache_of
from millpond_lab.bench.offload.settings import OffloadSettings
from millpond_lab.bench.offload.shapes import prompts_of
from millpond_lab.bench.offload.waited import waited_s


def time_batch(model: Any, batch: int, settings: OffloadSettings) -> dict[str, Any]:
    """The prompts together, then `settings.steps` decoding steps; the rest is projected with their median."""
    ids = torch.tensor(prompts_of(batch, settings.prompt, settings.shape))
    times, waited = [time.perf_counter()], waited_s()
    with torch.no_grad():
        out = model(ids, use_cache=True, logits_to_keep=1)
        for _ in range(settings.steps):
            times.append(time.perf_counter())
            newest = out.logits[:, -1:].argmax(-1)
            out = model(newest, **cache_argument(cache_of(out)), use_cache=True)
    times.append(time.perf_counter())
    parts = [after - before for before, after in pairwise(times)]
    step_s = statistics.median(parts[1:])
    seconds = parts[0] + (settings.new - 1) * step_s
    return {
        "requests": batch,
        "new_tokens": batch * settings.new,
        "seconds": seconds,
        "projected": True,
        "tokens_per_s": batch * settings.new / seconds,
        "prefill_s": parts[0],
        "decode_step_s": step_s,
        "decode_steps": settings.steps,
        "waited_s": waited_s() - waited,
        "timed_s": times[-1] - times[0],
    }
