"""Decoding over own and shared entries in one parallel loop, against two calls.

    python benchmarks/performance/fused_attention.py --threads 1 --json benchmarks/results/fused-attention.json

A round runs both ways one after the other, in random order, and counts CPU seconds of the process, so that other
processes of the machine matter less. A ratio is the median over the rounds, with its interval by the bootstrap.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path

import torch
from script import interval, keep

from millpond_lab.bench.kernels.attention import DecodeSetup
from millpond_lab.bench.kernels.shared_prefix import HEADS, paired_rounds, shared_steps

#: Sequences and entries of each.
BATCHES = ((32, 2048), (8, 2048), (64, 512))
SLOTS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--percent", type=int, nargs="+", default=[50, 90], help="Shares of common entries.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true", help="Count the time of a clock.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
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
                clock = time.perf_counter if args.wall else time.process_time
                times = paired_rounds(step(shared), step(shared, apart=True), args.rounds, clock)
                fused, apart = zip(*times, strict=True)
                ratios = [a / b for a, b in times]
                row = {
                    "sequences": n_seq,
                    "entries": length,
                    "heads": name,
                    "shared": shared,
                    "fused_ms": statistics.median(fused),
                    "two_calls_ms": statistics.median(apart),
                    "ratio": statistics.median(ratios),
                    "interval": interval(ratios),
                }
                results.append(row)
                low, high = row["interval"]
                print(
                    f"{n_seq} x {length}, {name}, {percent} % shared: {row['fused_ms']:.3f} ms, "
                    f"two calls {row['two_calls_ms']:.3f} ms: {row['ratio']:.3f} [{low:.3f}, {high:.3f}]",
                    flush=True,
                )
    keep(args, results)


if __name__ == "__main__":
    main()
