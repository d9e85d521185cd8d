"""The board: the page of its tables, and the table of the README, from the committed rows."""

from __future__ import annotations

import json
from typing import Any

from generated.results import RESULTS
from millpond_lab.evals.report.board import board_page
from millpond_lab.evals.report.default_choice import choice_table, choose

ROWS = RESULTS / "board.json"


def board() -> str:
    """The page: what every setting keeps, and what is chosen by that."""
    report: dict[str, Any] = json.loads(ROWS.read_text(encoding="utf-8"))
    chosen = choice_table(choose(report)).replace("# The default", "## What is chosen")
    return f"{board_page(report)}\n{chosen}"
