"""The default of every entry point, and the presets, from the rows of board.py.

    cd benchmarks/results && python ../quality/default_choice.py --rows board.json --out default-choice.json

The rule is that of `millpond_lab.evals.report.default_choice`. What has no rows of every task is named, and left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from millpond_lab.evals.report.default_choice import choice_table, choose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="what board.py wrote")
    parser.add_argument("--models", nargs="+", help="some of its models")
    parser.add_argument("--out", type=Path, required=True, help="as .json; the table lies next to it, as .md")
    args = parser.parse_args()
    data = choose(json.loads(args.rows.read_text(encoding="utf-8")), args.models)
    args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(choice_table(data), encoding="utf-8")
    print(choice_table(data))


if __name__ == "__main__":
    main()
