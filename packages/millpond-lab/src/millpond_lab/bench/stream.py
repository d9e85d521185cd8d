"""`millpond bench stream`: endless text through one cache, its memory and step time from beginning to end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from millpond.hf.compress import compress
from millpond.models.cache_argument import cache_argument
from millpond_lab.bench.common.machine import describe_machine, resident_bytes

PROMPT = 64  #: tokens of the first pass
STAGES = 10  #: rows of the report


@dataclass(frozen=True)
class Stage:
    """A stretch of the stream: how fast its steps were and what was held at its end."""

    method: str
    seen: int
    step_us: float  # median
    stored: int  # entries of the fullest head
    kv_bytes: int
    reserved_bytes: int
    resident_bytes: int | None


def run(
    model: PreTrainedModel, methods: list[str], tokens: int, budget: int, seed: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Feed `tokens` random tokens, one at a time, to `model` under each method; returns what `report` writes."""
    machine = describe_machine()
    stages = [stage for method in methods for stage in _stream(model, method, tokens, budget, seed, progress)]
    return {
        "benchmark": "stream",
        "machine": machine.as_dict(),
        "hardware": machine.hardware,
        "software": machine.software,
        "model": {"type": model.config.model_type, "parameters": model.num_parameters()},
        "tokens": tokens,
        "budget": budget,
        "seed": seed,
        "results": [asdict(stage) for stage in stages],
    }


@torch.inference_mode()
def _stream(
    model: PreTrainedModel, method: str, tokens: int, budget: int, seed: int, progress: Callable[[str], None]
) -> list[Stage]:
    draw = torch.Generator().manual_seed(seed)
    stages: list[Stage] = []
    vocabulary = int(model.config.vocab_size)
    with compress(model, method, budget) as cache:
        model(torch.randint(vocabulary, (1, PROMPT), generator=draw), **cache_argument(cache), logits_to_keep=1)
        length = -(-(tokens - PROMPT) // STAGES)
        for begin in range(PROMPT, tokens, length):
            text = torch.randint(vocabulary, (1, min(length, tokens - begin)), generator=draw)
            times = []
            for t in range(text.shape[1]):
                before = time.perf_counter()
                model(text[:, t : t + 1], **cache_argument(cache))
                times.append(time.perf_counter() - before)
                if t % 1000 == 0:
                    progress(f"{method}: {begin + t:,} of {tokens:,} tokens")
            stats = cache.stats()
            stages.append(
                Stage(
                    method,
                    stats.seen[0],
                    1e6 * statistics.median(times),
                    max(n for layer in stats.stored for sequence in layer for n in sequence),
                    stats.kv_bytes,
                    stats.reserved_bytes,
                    resident_bytes(),
                )
            )
    return stages
