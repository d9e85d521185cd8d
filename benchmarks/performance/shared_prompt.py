"""Sequences that share a prompt, end to end: its entries held and attended once, held once, or held by each.

    python benchmarks/performance/shared_prompt.py --threads 1 --json benchmarks/results/shared-prompt.json

Three engines of one random model with as many KV heads as query heads hold the same sequences: a common prompt and a
few tokens of each. "once" is the engine's default; "held once" has the same pages, which each sequence attends to by
itself (as with pages that sequences share in other engines); "each" is `prefix_cache=False`. Those of "each" continue
copies of the sequences of "once", so that the same prompt need not be read as often for the comparison; what one prompt
takes to read alone is measured. Then all decode a few steps in turns, in random order, so that whatever else the
machine does slows all alike. Seconds are those of the processor; a row has the medians over the rounds, and the ratios
within rounds with the interval of their median by the bootstrap. A run goes on from the rows that the file of --json
has.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from script import GrowingRows, begin, interval

from millpond.cache.pages import shared_prefix
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond_lab.bench.generate.candidates import ModelShape

#: 0.16B without groups of query heads.
SHAPE = ModelShape(heads=16, kv_heads=16, ffn=2048)
#: Name -> `prefix_cache`, and the least entries of a run that is attended once.
MODES = {
    "once": ("live", shared_prefix.MIN_SHARED_ENTRIES),
    "held once": ("live", 1 << 62),
    "each": (False, shared_prefix.MIN_SHARED_ENTRIES),
}


class Sequences:
    """An engine whose sequences have a prompt in common.

    Args:
        prompts: that it reads; in pieces of a whole step, so that all begin to decode together.
        room: tokens of a step.

    Attributes:
        read_s: CPU seconds until all have read. kv_bytes: most bytes in pages so far.
    """

    def __init__(self, model: Any, mode: str, prompts: list[list[int]], new_tokens: int, room: int) -> None:
        prefix_cache, self._least = MODES[mode]
        self.read_s, self.kv_bytes = 0.0, 0
        self.engine = Engine(model, method="full", prefix_cache=prefix_cache, max_step_tokens=room)
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        for number, ids in enumerate(prompts):
            self.engine.add(Request(request_id=str(number), prompt=tuple(ids), params=params))
        while (stats := self.engine.stats()).prompt_tokens + stats.shared_tokens < sum(map(len, prompts)):
            self.read_s += self.step()

    def take_over(self, other: Sequences, count: int) -> None:
        """Continue copies of the sequences of another engine."""
        for number in range(count):
            copy = other.engine.checkpoint(str(number))
            assert copy is not None, "it decodes"
            self.engine.import_request(copy)

    def step(self) -> float:
        """CPU seconds of a step."""
        began = time.process_time()
        with mock.patch.object(shared_prefix, "MIN_SHARED_ENTRIES", self._least):
            self.engine.step()
        took = time.process_time() - began
        self.kv_bytes = max(self.kv_bytes, self.engine.stats().kv_bytes)
        return took

    @property
    def decoding(self) -> int:
        """Sequences that decode."""
        return self.engine.stats().running

    def close(self) -> None:
        """Free the memory."""
        self.engine.close()


def measure(model: Any, vocab: int, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """The row of a length."""
    drawn = torch.Generator().manual_seed(args.seed)
    common = torch.randint(1, vocab, (length,), generator=drawn).tolist()
    prompts = [common + torch.randint(1, vocab, (args.own,), generator=drawn).tolist() for _ in range(args.sequences)]
    new, room = args.rounds * args.steps + 4, (length + args.own) * args.sequences
    alone = Sequences(model, "each", prompts[:1], 2, room)
    alone.close()
    all_of = {mode: Sequences(model, mode, prompts if mode != "each" else [], new, room) for mode in MODES}
    all_of["each"].take_over(all_of["once"], args.sequences)
    turns, seconds = random.Random(args.seed), {mode: list[float]() for mode in MODES}
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(args.rounds):
        for mode in turns.sample(list(MODES), len(MODES)):
            seconds[mode].append(sum(all_of[mode].step() for _ in range(args.steps)))
            assert all_of[mode].decoding == args.sequences, "all decode in every step"
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    row: dict[str, Any] = {"prompt": length, "sequences": args.sequences, "new_tokens": args.rounds * args.steps}
    for mode, own in all_of.items():
        rate = args.sequences * args.steps / statistics.median(seconds[mode])
        read = own.read_s if mode != "each" else args.sequences * alone.read_s
        row[mode] = {"tokens_per_cpu_s": rate, "read_cpu_s": read, "kv_bytes": own.kv_bytes}
        own.close()
    for mode in ("held once", "each"):
        ratios = [other / once for other, once in zip(seconds[mode], seconds["once"], strict=True)]
        row[f"once over {mode}"] = [statistics.median(ratios), *interval(ratios)]
    return row | {"cpu_of_wall": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 2048, 4096], help="Tokens of common prompts.")
    for name, value in (("sequences", 16), ("own", 16), ("rounds", 16), ("steps", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args, shape = begin(parser)
    shape = replace(shape, kv_heads=shape.heads) if args.tiny else SHAPE
    model = shape.build()
    load = {name: getattr(args, name) for name in ("threads", "tiny", "own", "rounds", "steps", "seed")}
    load["parameters"] = sum(weight.numel() for weight in model.parameters())
    rows = GrowingRows(args.json, load, "prompt", "sequences")
    for length in args.prompts:
        if not rows.has(length, args.sequences):
            rows.add(measure(model, shape.vocab, length, args))


if __name__ == "__main__":
    main()
