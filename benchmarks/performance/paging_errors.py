"""Misses of paging rules over the share of their bits that is wrong, beside LRU, Marker and the least possible.

    python benchmarks/performance/paging_errors.py --trace mooncake:FILE --json benchmarks/results/paging-errors.json

Bits come from a replay of the same trace, those of `mark0` and `learned` from Belady's rule and those of `mark_predict`
from the phases; a share of them, drawn by a seed, is flipped. `learned` keeps to LRU where the bits do worse. Beside
the misses of `mark0` and `mark_predict` stand those that the theorems of their paper allow (arXiv:2210.02775). Each row
is one replay from an empty cache; a run goes on from the rows that the file of --json has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from script import GrowingRows

from millpond.cache.paging import PAGING
from millpond_lab.bench.paging.candidates import THEOREMS, PagingTrace
from millpond_lab.bench.paging.trace_paths import read_paths
from millpond_lab.paging.replay import replay

#: Shares of wrong bits, in percent.
WRONG = (0, 2, 5, 10, 20, 30, 40, 50)
#: A rule, and what its bits are.
RULES = (*THEOREMS, ("learned", "belady"))


def replays(trace: PagingTrace, rows: GrowingRows, wrong: list[int], seeds: int) -> None:
    """Add what is missing: rules without bits, then those with bits, at each share and seed."""
    for rule in ("belady", "lru"):
        if not rows.has(rule, None, 0):
            rows.add({"rule": rule, "wrong": None, "seed": 0, "misses": trace.run(rule).misses})
    for seed in range(seeds):
        if not rows.has("marker", None, seed):
            found = replay(trace.requests, PAGING.get("marker")(seed=seed), trace.pages)
            rows.add({"rule": "marker", "wrong": None, "seed": seed, "misses": found.misses})
        for percent in wrong:
            for rule, kind in RULES:
                if rows.has(rule, percent, seed):
                    continue
                bits = trace.bits(kind, percent / 100, seed)
                options = {"seed": seed} if (rule, kind) in THEOREMS else {}
                found = replay(trace.requests, PAGING.get(rule)(**options), trace.pages, bits=bits)
                row = {"rule": rule, "wrong": percent, "seed": seed, "misses": found.misses}
                if (rule, kind) in THEOREMS:
                    row["bound"] = round(trace.bound_of(rule, kind, bits))
                rows.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="KIND:FILE, as `millpond bench paging` has it.")
    parser.add_argument("--pages", type=int, default=6000)
    parser.add_argument("--wrong", type=int, nargs="+", default=list(WRONG), help="Percent of the bits.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    requests = read_paths(args.trace)
    accesses, distinct = sum(map(len, requests)), len({key for path in requests for key in path})
    load = {"trace": args.trace.rpartition("/")[2].rpartition(":")[2], "pages": args.pages}
    load |= {"requests": len(requests), "accesses": accesses, "distinct": distinct}
    rows = GrowingRows(args.json, load, "rule", "wrong", "seed")
    replays(PagingTrace(requests, args.pages), rows, args.wrong, args.seeds)


if __name__ == "__main__":
    main()
