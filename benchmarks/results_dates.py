"""Write the day of each committed result, of the newest commit that changed its files, into results/dates.json.

    python benchmarks/results_dates.py     then: make docs-pages

A result that is not committed yet gets today. The history of the repository must be at hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from generated.results_page import DATES, entries  # noqa: E402  # the folder is on the path now


def day_of(paths: list[Path]) -> str:
    """The day of the newest commit that changed some files; today, where there is none."""
    command = ["git", "log", "-1", "--format=%cd", "--date=short", "--", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip() or datetime.now(UTC).date().isoformat()


def main() -> None:
    days = {name: day_of(paths) for name, paths in entries().items()}
    DATES.write_text(json.dumps(days, indent=0, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
