"""What the papers' orderings and kvpress come to, on the samples of runs: DIR ... --out FILE. `make docs` shows it.

Samples are not committed; what this writes is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from millpond.evals.findings import Runs, write_findings


def main() -> None:
    """Compare, and say how much there was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="what millpond eval wrote, with samples.jsonl")
    parser.add_argument("--out", required=True, type=Path, help="a JSON file")
    chosen = parser.parse_args()
    found = Runs(chosen.folders).findings()
    write_findings(chosen.out, found)
    print(f"{len(found)} comparisons written to {chosen.out}")


if __name__ == "__main__":
    main()
