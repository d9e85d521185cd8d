"""Formats by age against plain formats at equal bytes: KL against the full cache on windows of a text.

Usage: python benchmarks/quality/codec_ages.py TEXT [--model smollm2-135m] [--method h2o] [--dtype f32]
    [--budgets 20%,35%,50%,75%,100%] [--plain int8,int4,rotated4]
    [--ages "bf16:20%;int8:20%;int4 bf16:20%;int4 int8:20%;int4"] [--windows 40] [--length 1024] [--continuation 64]
    [--batch 4] [--threads 1] [--seed 0] [--table FILE] [--out benchmarks/results/codec-ages]

Every format is measured with every budget on the same windows. For each setting of a format by age, the KL that a plain
format has at the same bytes is interpolated in each window between its two budgets around them (logarithms of KL over
logarithms of bytes); the table has the mean of the differences, with a paired bootstrap over windows. Where a plain
format has no budgets on both sides, nothing is compared.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import millpond as mp
from millpond.hf.fit import FitRow, load_fit
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table, write_report
from millpond_lab.evals.harness.summary import bootstrap
from millpond_lab.fit import fit

#: Below it two predictions are the same up to rounding, in nats.
LEAST_KL = 1e-9


def interpolated(rows: list[FitRow], share: float) -> np.ndarray | None:
    """(windows,): the KL of a format at a share of bytes, between the two of its budgets around it; None: outside."""
    rows = sorted(rows, key=lambda row: row.bytes_share)
    for low, high in pairwise(rows):
        if low.bytes_share <= share <= high.bytes_share:
            span = np.log(high.bytes_share / low.bytes_share)
            part = np.log(share / low.bytes_share) / span if span else 0.0
            ends = [np.log(np.maximum(row.kl, LEAST_KL)) for row in (low, high)]
            return np.exp(ends[0] * (1 - part) + ends[1] * part)
    return None


def compared(rows: list[FitRow], plain: list[str], ages: list[str], seed: int) -> list[dict[str, Any]]:
    """Each setting of a format by age and each plain format."""
    of = {codec: [row for row in rows if row.codec == codec] for codec in [*plain, *ages]}
    found = []
    for codec in ages:
        for row in of[codec]:
            for other in plain:
                plain_kl = interpolated(of[other], row.bytes_share)
                if plain_kl is None:
                    continue
                lost = np.array(row.kl) - plain_kl
                low, high = np.percentile(bootstrap(lost, np.ones(len(lost)), seed), [2.5, 97.5])
                found.append(
                    {
                        "codec": codec,
                        "budget": row.budget,
                        "bytes_share": row.bytes_share,
                        "against": other,
                        "kl": float(np.mean(row.kl)),
                        "kl_against": float(plain_kl.mean()),
                        "difference": float(lost.mean()),
                        "low": float(low),
                        "high": float(high),
                        "windows": len(lost),
                    }
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    for name, text in (
        ("model", "smollm2-135m"),
        ("method", "h2o"),
        ("dtype", "f32"),
        ("budgets", "20%,35%,50%,75%,100%"),
        ("plain", "int8,int4,rotated4"),
        ("ages", "bf16:20%;int8:20%;int4 bf16:20%;int4 int8:20%;int4"),
    ):
        parser.add_argument(f"--{name}", default=text)
    for name, number in (
        ("windows", 40),
        ("length", 1024),
        ("continuation", 64),
        ("batch", 4),
        ("threads", 1),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--table", type=Path, default=Path("out/codec-ages.json"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/codec-ages"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", category=UserWarning)
    plain, ages = args.plain.split(","), args.ages.split()
    if args.table.exists():
        table = load_fit(args.table)
    else:
        model, tokenizer = mp.load_model(args.model, args.dtype), mp.load_tokenizer(args.model)
        table = fit(
            model,
            tokenizer,
            args.text,
            args.method,
            budgets=args.budgets.split(","),
            codecs=[*plain, *ages],
            context=args.length,
            continuation=args.continuation,
            windows=args.windows,
            batch=args.batch,
            seed=args.seed,
            out=args.table,
            progress=lambda done, total: print(f"{done} of {total}", flush=True),
        )
    pairs = compared(list(table.rows), plain, ages, args.seed)
    settings = [
        [row.budget or "all", row.codec, f"{row.bytes_share:.1%}", f"{np.mean(row.kl):.4f}"]
        for row in sorted(table.rows, key=lambda row: row.bytes_share)
    ]
    lines = [
        [
            one["codec"],
            one["budget"],
            f"{one['bytes_share']:.1%}",
            one["against"],
            f"{one['kl']:.4f}",
            f"{one['kl_against']:.4f}",
            f"{one['difference']:+.4f}",
            f"{one['low']:+.4f} to {one['high']:+.4f}",
        ]
        for one in pairs
    ]
    about = {
        "model": args.model,
        "dtype": args.dtype,
        "method": args.method,
        "text": args.text.name,
        "windows": len(table.rows[0].kl),
        "context": args.length,
        "continuation": args.continuation,
        "seed": args.seed,
        "machine": asdict(describe_machine()),
        "rows": [asdict(row) for row in table.rows],
        "pairs": pairs,
    }
    text = (
        f"# Formats by age, {args.model}\n\n`{args.method}` on {len(table.rows[0].kl)} windows of {args.text.name}, "
        f"{args.length} tokens and {args.continuation} more, {args.dtype}. KL against the full cache, in nats.\n\n"
        + markdown_table(["budget", "codec", "bytes of full", "mean KL"], settings)
        + "\n\nAt equal bytes, paired over windows; below 0 the format by age is better:\n\n"
        + markdown_table(
            ["by age", "budget", "bytes of full", "plain", "KL by age", "KL plain", "difference", "95 %"], lines
        )
        + "\n"
    )
    write_report(args.out.parent, args.out.name, about, text)
    print(text)


if __name__ == "__main__":
    main()
