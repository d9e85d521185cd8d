"""Decoding over own and shared entries in one parallel loop, against two calls; and prompts behind a common beginning.

    python benchmarks/performance/fused_attention.py --threads 1 --json benchmarks/results/fused-attention.json

A round runs both ways one after the other, in random order, and counts CPU seconds of the process, so that other
processes of the machine matter less. A ratio is the median over the rounds, with its interval by the bootstrap. With
--prompts it is the attention of several prompts behind one beginning: their own tokens each, and the beginning once for
all of them, against each prompt reading everything, as engines do.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from script import interval, keep

from millpond.kernels import ops
from millpond.kernels.args import AttendArgs, AttentionShape, PageRegions, PrefillArgs
from millpond_lab.bench.kernels.attention import DecodeSetup
from millpond_lab.bench.kernels.shared_prefix import HEADS, paired_rounds, shared_steps

#: Sequences and entries of each.
BATCHES = ((32, 2048), (8, 2048), (64, 512))
SLOTS = 32
#: Prompts, entries of their common beginning, and own tokens of each.
PROMPTS = ((8, 1024, 16), (8, 1024, 64), (8, 512, 128), (4, 512, 512))
#: KV heads, query heads of each, head_dim.
SHAPES = ((3, 3, 64), (2, 7, 64), (8, 4, 128))


def measured(one: Callable[[], object], other: Callable[[], object], args: argparse.Namespace) -> dict[str, object]:
    """Medians of both, and of their ratios."""
    times = paired_rounds(one, other, args.rounds, time.perf_counter if args.wall else time.process_time)
    ours, theirs = zip(*times, strict=True)
    ratios = [a / b for a, b in times]
    middle, (low, high) = statistics.median(ratios), interval(ratios)
    shown = f"{statistics.median(ours):.3f} ms, against {statistics.median(theirs):.3f} ms"
    print(f"{shown}: {middle:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    return {
        "ms": statistics.median(ours),
        "other_ms": statistics.median(theirs),
        "ratio": middle,
        "interval": (low, high),
    }


def steps(args: argparse.Namespace) -> list[dict[str, object]]:
    """Decoding steps in one loop, against two calls."""
    results = []
    for n_seq, length in BATCHES:
        for name, (n_kv_heads, group, dim) in HEADS.items():
            lens = (length,) * n_seq
            setup = DecodeSetup(
                torch.bfloat16, SLOTS, n_seq=n_seq, n_kv_heads=n_kv_heads, group=group, dim=dim, lens=lens
            )
            step = shared_steps(setup)
            for percent in args.percent:
                shared = length * percent // 100 // SLOTS * SLOTS
                print(f"{n_seq} x {length}, {name}, {percent} % shared: ", end="")
                of = {"sequences": n_seq, "entries": length, "heads": name, "shared": shared}
                results.append(of | measured(step(shared), step(shared, apart=True), args))
    return results


def prompts(args: argparse.Namespace) -> list[dict[str, object]]:
    """Prompts whose common beginning is read once, against each reading it."""
    results = []
    for n_kv_heads, group, dim in SHAPES:
        for n, shared, own in PROMPTS:
            setup = DecodeSetup(
                torch.bfloat16, SLOTS, n_seq=1, n_kv_heads=n_kv_heads, group=group, dim=dim, lens=(shared,)
            )
            together, each = _prompts(setup, n, own)
            print(f"{n} x {own} behind {shared}, {n_kv_heads} x {group} heads of {dim}: ", end="")
            of = {"prompts": n, "own": own, "shared": shared, "kv_heads": n_kv_heads, "group": group, "dim": dim}
            results.append(of | measured(together, each, args))
    return results


def _prompts(setup: DecodeSetup, n: int, own: int) -> tuple[Callable[[], object], Callable[[], object]]:
    pages, table = setup.fill()
    shared = setup.lens[0]
    regions = PageRegions(pages, table[:, : shared // SLOTS].contiguous(), setup.region_lens())
    heads, dim, dtype = setup.n_kv_heads * setup.group, setup.dim, setup.dtype
    q = [torch.randn(heads, own, dim).to(dtype) for _ in range(n)]
    k, v = ([torch.randn(setup.n_kv_heads, own, dim).to(dtype) for _ in range(n)] for _ in range(2))
    positions, shape = torch.arange(shared, shared + own, dtype=torch.int32), AttentionShape(dim**-0.5)

    def each() -> object:
        outs = []
        for i in range(n):
            past = ops.read(regions, shared)
            keys, values = torch.cat([past.keys, k[i]], 1), torch.cat([past.values, v[i]], 1)
            outs.append(ops.prefill(PrefillArgs(q[i], keys, values, positions, shape, past.positions)).out)
        return outs

    def together() -> object:
        parts = [ops.prefill(PrefillArgs(*one, positions, shape)) for one in zip(q, k, v, strict=True)]
        rows = torch.cat([one.transpose(0, 1) for one in q])
        out = torch.cat([part.out.transpose(0, 1) for part in parts]).contiguous()
        lse = torch.cat([part.lse.T for part in parts]).contiguous()
        return ops.attend(AttendArgs(rows, regions, shape.scale, partial=(out, lse)))

    return together, each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--percent", type=int, nargs="+", default=[50, 90], help="Shares of common entries.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", action="store_true", help="Prompts in place of decoding steps.")
    parser.add_argument("--wall", action="store_true", help="Count the time of a clock.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    keep(args, prompts(args) if args.prompts else steps(args))


if __name__ == "__main__":
    main()
