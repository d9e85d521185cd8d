"""The board: the page of its tables, and the table of the README, from the committed rows."""

from __future__ import annotations

from generated.results import read
from millpond_lab.evals.report.board import board_page, summary_table
from millpond_lab.evals.report.default_choice import choice_table, choose

#: Models of the README's table, as it names them.
NAMES = {"smollm2-135m": "SmolLM2-135M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B"}


def board() -> str:
    """The page: what every setting keeps, and what is chosen by that."""
    report = read("board")
    chosen = choice_table(choose(report)).replace("# The default", "## What is chosen")
    return f"{board_page(report)}\n{chosen}"


def board_summary() -> str:
    """The table of both models."""
    return summary_table(read("board"), NAMES)
