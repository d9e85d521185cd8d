"""What the papers' orderings and kvpress come to, on the samples of runs: DIR ... --out FILE. `make docs` shows it.

Samples are not committed; what this writes is. With --renew, what FILE says of pairs without samples here stays;
--claim NAME leaves it at the pairs of one claim (packages/millpond-lab/src/millpond_lab/evals/report/claims.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from millpond_lab.evals.report.claims import CLAIMS, Runs, read_findings, renewed, write_findings


def main() -> None:
    """Compare, and say how much there was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="what millpond eval wrote, with samples.jsonl")
    parser.add_argument("--out", required=True, type=Path, help="a JSON file")
    parser.add_argument("--renew", action="store_true", help="keep what FILE says of other pairs and protocols")
    parser.add_argument("--claim", choices=[claim.name for claim in CLAIMS], help="only its pairs, and --renew")
    chosen = parser.parse_args()
    found = [f for f in Runs(chosen.folders).findings() if chosen.claim in (None, f.claim)]
    if chosen.renew or chosen.claim:
        found = renewed(read_findings(chosen.out), found)
    write_findings(chosen.out, found)
    print(f"{len(found)} comparisons written to {chosen.out}")


if __name__ == "__main__":
    main()
