"""The goals of a card's rows, from the list that `benchmarks/gpu/run_all.py` has too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from generated.results import ROOT
from millpond_lab.bench.common.report import markdown_table

sys.path.append(str(ROOT / "benchmarks" / "gpu"))

from gpu_goals import to_show, verdicts


def goal_table(rows: Sequence[dict[str, Any]]) -> str:
    """Each goal whose rows are there, what was reached, and whether it is met; empty where there is none."""
    found = to_show(verdicts(rows))
    if not found:
        return ""
    table = markdown_table(
        ("section", "cell", "goal", "reached", ""),
        [
            (verdict.goal.section, verdict.cell, verdict.goal.said(verdict.cell), verdict.reached, verdict.word)
            for verdict in found
        ],
    )
    met = sum(verdict.met for verdict in found)
    return f"What these figures should be: {met} of {len(found)} goals are met.\n\n{table}"
