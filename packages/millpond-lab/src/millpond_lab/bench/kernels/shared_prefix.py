"""Speed of decode attention where sequences share a prefix, read once, or each reading everything itself.

Rounds are paired: each times both ways one after the other, in an order of its own, and a row's share is the median of
the ratios of its rounds, so that a machine that others use slows both alike.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from millpond.kernels import ops
from millpond.kernels.args import (
    AttendArgs,
    AttentionShape,
    DecodeArgs,
    PageRegions,
    SharedDecodeArgs,
    SharedRegions,
    StepRegions,
)
from millpond.kernels.decode_rules import KEEP_ALL, UNBOUNDED
from millpond_lab.bench.kernels.attention import DecodeSetup, KernelRow

BATCH, LENGTH = 32, 2048
#: KV heads, query heads of each, head_dim: caches without groups, as ChunkAttention's kernels have them, and with.
HEADS = {
    "MHA, 8 heads of 128": (8, 1, 128),
    "MHA, 16 heads of 64": (16, 1, 64),
    "GQA 4:1, 4 heads of 128": (4, 4, 128),
    "GQA 4:1, 4 heads of 64": (4, 4, 64),
}
#: Percent of each sequence that all share, and the required speedup over separate reads.
ASKED = {0: 0.95, 50: 1.5, 100: 10.0}


def shared_steps(setup: DecodeSetup) -> Callable[..., Callable[[], object]]:
    """A step of `setup` by the entries that all share, as `PagedAttention.step` runs it: whole pages, 0 to LENGTH.

    With `apart`, own entries and shared ones are attended to by calls of their own.
    """
    pages, table = setup.fill()
    lens, n_kv_heads, length = setup.region_lens(), setup.n_kv_heads, setup.lens[0]
    q = torch.randn(setup.n_seq, n_kv_heads * setup.group, setup.dim).to(setup.dtype)
    new = torch.randn(setup.n_seq, n_kv_heads, setup.dim).to(setup.dtype)
    caps, recent = torch.full_like(lens, UNBOUNDED), torch.zeros_like(lens)
    q_pos, shape = torch.full((setup.n_seq,), length, dtype=torch.int32), AttentionShape(setup.dim**-0.5)
    members = torch.arange(setup.n_seq)

    def step(shared: int, *, apart: bool = False) -> Callable[[], object]:
        own, rest = table[:, shared // setup.slots :].contiguous(), lens - shared
        entries = PageRegions(pages, table[:n_kv_heads], torch.full_like(lens[:n_kv_heads], shared))

        def call() -> Tensor:
            regions = StepRegions(PageRegions(pages, own, rest.clone()), caps, recent, q_pos, KEEP_ALL, shape)
            args = DecodeArgs(q, new, new, regions)
            if not shared:
                return ops.decode(args).out
            if not apart:
                return ops.decode_shared(SharedDecodeArgs(args, (SharedRegions(members, entries),))).out
            out, lse, _ = ops.decode(args)
            return ops.attend(AttendArgs(q, entries, shape.scale, members=members, partial=(out, lse))).out

        return call

    return step


def paired_rounds(
    one: Callable[[], object], other: Callable[[], object], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[tuple[float, float]]:
    """Milliseconds of both in each round, in random order; two rounds before them are not counted."""
    times: list[tuple[float, float]] = []
    rng = random.Random(0)
    for _ in range(rounds + 2):
        took = [0.0, 0.0]
        for which in rng.sample((0, 1), 2):
            start = clock()
            (one, other)[which]()
            took[which] = 1e3 * (clock() - start)
        times.append((took[0], took[1]))
    return times[2:]


def paired(one: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median milliseconds of both, and the median over the rounds of how many times as long `one` took."""
    times = paired_rounds(one, other, rounds)
    ours, theirs = zip(*times, strict=True)
    return statistics.median(ours), statistics.median(theirs), statistics.median(a / b for a, b in times)


def shared_rows(rounds: int = 20) -> list[KernelRow]:
    """Steps at several lengths of the shared prefix, against every sequence reading a copy of its own."""
    rows = []
    for name, (n_kv_heads, group, dim) in HEADS.items():
        setup = DecodeSetup(
            torch.bfloat16, 32, n_seq=BATCH, n_kv_heads=n_kv_heads, group=group, dim=dim, lens=(LENGTH,) * BATCH
        )
        step = shared_steps(setup)
        for percent, asked in ASKED.items():
            alone, together, share = paired(step(0), step(LENGTH * percent // 100), rounds)
            holds = "holds" if share >= asked else "missed"
            of = f"each alone ({alone:.2f} ms); {100 * asked:.0f}% required: {holds}"
            rows.append(KernelRow(f"{BATCH} x {LENGTH}, {name}, {percent}% shared", together, 0.0, share, of))
    return rows
