"""Whether `budget="auto"` keeps its bound on another text than the one that was measured.

Usage: python benchmarks/quality/max_kl.py FIT_TEXT TEST_TEXT [--model smollm2-135m] [--method h2o] [--dtype f32]
    [--budgets 10%,20%,35%,50%,75%,100%] [--codecs auto,int8,int4] [--bounds 0.01,0.03,0.1]
    [--fixed "20% auto,50% auto"] [--windows 80] [--tests 60] [--length 512] [--continuation 64] [--batch 4]
    [--threads 1] [--seed 0]
    [--tables FOLDER] [--out benchmarks/results/max-kl]

`mp.fit` measures the grid on windows of the first text. For each bound the setting that the table chooses is measured
on windows of the second, and the share of them is counted whose KL against the full cache is at most the bound, with
Wilson's 95 % interval; fixed settings are measured for comparison. A second table asks the same of every measured
setting with its own figure of the table as the bound. Tables stay in --tables, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import millpond as mp
from millpond.errors import OptionError
from millpond.hf.fit import Fit, FitRow, load_fit
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table, write_report
from millpond_lab.evals.harness.summary import share_interval
from millpond_lab.fit import fit


def measured(args: argparse.Namespace, model: Any, tokenizer: Any, text: Path, grid: tuple[str, str], n: int) -> Fit:
    """The table of a text over budgets and codecs, from its file where an earlier run wrote one."""
    budgets, codecs = grid
    name = f"{text.stem}-{args.method}-{budgets}-{codecs}-{n}-{args.length}-{args.continuation}-{args.seed}"
    path = args.tables / f"{''.join(c if c.isalnum() else '_' for c in name)}.json"
    if path.exists():
        return load_fit(path)
    return fit(
        model,
        tokenizer,
        text,
        args.method,
        budgets=budgets.split(","),
        codecs=codecs.split(","),
        context=args.length,
        continuation=args.continuation,
        windows=n,
        batch=args.batch,
        seed=args.seed,
        out=path,
        progress=lambda done, total: print(f"{text.stem} {budgets} {codecs}: {done} of {total}", flush=True),
    )


def share_below(row: FitRow, bound: float) -> dict[str, Any]:
    """How many windows of a row keep a bound."""
    met = np.array([kl <= bound for kl in row.kl], dtype=float)
    found = share_interval(met)
    return {
        "bound": bound,
        "budget": row.budget,
        "codec": row.codec,
        "bytes_share": row.bytes_share,
        "windows": len(met),
        "met": int(met.sum()),
        "share": found.mean,
        "low": found.low,
        "high": found.high,
        "mean_kl": float(np.mean(row.kl)),
    }


def line(kind: str, one: dict[str, Any]) -> list[str]:
    """A row of the tables."""
    return [
        kind,
        f"{one['bound']:.4g}",
        one["budget"] or "all",
        one["codec"],
        f"{one['bytes_share']:.1%}",
        f"{one['met']} of {one['windows']}",
        f"{one['share']:.1%}",
        f"{one['low']:.1%} to {one['high']:.1%}",
        f"{one['mean_kl']:.4f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs=2, metavar="TEXT")
    for name, text in (
        ("model", "smollm2-135m"),
        ("method", "h2o"),
        ("dtype", "f32"),
        ("budgets", "10%,20%,35%,50%,75%,100%"),
        ("codecs", "auto,int8,int4"),
        ("bounds", "0.01,0.03,0.1"),
        ("fixed", "20% auto,50% auto"),
    ):
        parser.add_argument(f"--{name}", default=text)
    for name, number in (
        ("windows", 80),
        ("tests", 60),
        ("length", 512),
        ("continuation", 64),
        ("batch", 4),
        ("threads", 1),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--tables", type=Path, default=Path("out/max-kl"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/max-kl"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", category=UserWarning)
    args.tables.mkdir(parents=True, exist_ok=True)
    model, tokenizer = mp.load_model(args.model, args.dtype), mp.load_tokenizer(args.model)
    fit_text, test_text = args.texts
    table = measured(args, model, tokenizer, fit_text, (args.budgets, args.codecs), args.windows)
    chosen: dict[float, FitRow | None] = {}
    for bound in map(float, args.bounds.split(",")):
        try:
            chosen[bound] = table.choose(bound)
        except OptionError as error:
            print(f"max_kl {bound}: {error}", flush=True)
            chosen[bound] = None
    wanted: dict[str, set[str]] = {}
    for one in [row for row in chosen.values() if row is not None]:
        wanted.setdefault((one.budget or "100%").split(",")[0], set()).add(one.codec)
    fixed = [tuple(words.split()) for words in args.fixed.split(",")]
    for budget, codec in fixed:
        wanted.setdefault(budget, set()).add(codec)
    rows: dict[tuple[str | None, str], FitRow] = {}
    for budget, codecs in wanted.items():
        found = measured(args, model, tokenizer, test_text, (budget, ",".join(sorted(codecs))), args.tests)
        rows |= {(row.budget, row.codec): row for row in found.rows}
    kept = [share_below(rows[row.budget, row.codec], bound) for bound, row in chosen.items() if row is not None]
    others = [
        share_below(row, bound)
        for (budget, codec), row in rows.items()
        if any((str(budget).startswith(b), codec) == (True, c) for b, c in fixed)
        for bound in chosen
    ]
    own = {(row.budget, row.codec): row.bound for row in table.rows}
    each = [share_below(row, own[name]) for name, row in rows.items()]
    head = ["setting", "bound", "budget", "codec", "bytes of full", "kept the bound", "share", "95 %", "mean KL"]
    about = {
        "model": args.model,
        "dtype": args.dtype,
        "method": args.method,
        "fit_text": fit_text.name,
        "test_text": test_text.name,
        "fit_windows": args.windows,
        "context": args.length,
        "continuation": args.continuation,
        "seed": args.seed,
        "grid": [args.budgets, args.codecs],
        "machine": asdict(describe_machine()),
        "chosen": kept,
        "fixed": others,
        "own_bounds": each,
        "refused": [bound for bound, row in chosen.items() if row is None],
    }
    text = (
        f"# Budgets by quality on another text, {args.model}\n\n`{args.method}`, fitted on {args.windows} windows of "
        f"{fit_text.name}, measured on {args.tests} of {test_text.name}; {args.length} tokens and "
        f"{args.continuation} more, {args.dtype}.\n\n"
        + markdown_table(head, [line("auto", one) for one in kept] + [line("fixed", one) for one in others])
        + "\n\nEach measured setting against its own figure in the table (KL in 95 % of windows):\n\n"
        + markdown_table(head, [line("own figure", one) for one in each])
        + "\n"
    )
    write_report(args.out.parent, args.out.name, about, text)
    print(text)


if __name__ == "__main__":
    main()
