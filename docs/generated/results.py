"""The committed results that the documentation shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> Any:
    """The content of a JSON file of `benchmarks/results`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
