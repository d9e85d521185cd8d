"""Orders of papers on the board: pairs of rows over the same contexts, and a command where there are none."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond_lab.evals.candidates.candidate import find_candidate
from millpond_lab.evals.report.orders import ORDERS, order_difference, orders_table
from millpond_lab.evals.spec import Spec

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "quality" / "published_rows.toml"


def row(method: str, scores: list[float], budget: str = "20%", family: str = "facts") -> dict[str, Any]:
    return {"setting": [method, budget, "auto"], "family": family, "scores": scores}


def lines(*rows: dict[str, Any]) -> list[str]:
    return orders_table({"models": {"m": {"rows": list(rows)}}}, {"m": "M"}).splitlines()[2:]


def test_rows_of_both_are_compared_over_the_contexts_that_both_have() -> None:
    full = row("full", [1.0] * 12, "")
    found = lines(full, row("cake", [1.0] * 12), row("snapkv", [0.5, 0.75] * 5), row("lava", [0.0] * 12))
    cake, lava = (
        next(line for line in found if f"`{name}`" in line and "M, facts" in line) for name in ("cake", "lava")
    )
    assert "`cake` over `snapkv`" in cake
    assert "| M, facts, 20% | +0.38 (" in cake
    assert cake.endswith("10 contexts) | holds |")
    assert "`lava` over `cake`" in lava
    assert "-1.00 (-1.00 to -1.00, 12 contexts) | reversed |" in lava
    assert order_difference(row("a", [1.0, 0.0] * 4), row("b", [0.0, 1.0] * 4)).verdict == "no difference seen"


def test_where_neither_keeps_an_answer_nothing_is_said_of_their_order() -> None:
    full, none, late = row("full", [1.0] * 8, ""), [0.0] * 8, [0.0] * 7 + [0.5]
    found = lines(full, row("lava", none), row("cake", none), row("snapkv", late))
    lava, cake = (
        next(line for line in found if f"`{name}` over" in line and "M, facts" in line) for name in ("lava", "cake")
    )
    assert "not testable here, neither keeps an answer: `millpond eval" in lava
    assert cake.endswith("| no difference seen |")


def test_other_budgets_unsolved_tasks_and_other_kinds_of_tasks_are_not_compared() -> None:
    low = [row("full", [0.25] * 8, ""), row("cake", [0.25] * 8), row("snapkv", [0.0] * 8)]
    apart = [row("full", [1.0] * 8, ""), row("cake", [1.0] * 8), row("snapkv", [0.0] * 8, "10%")]
    other = [row("full", [1.0] * 8, ""), row("vase", [1.0] * 8), row("snapkv:decode=evict", [0.0] * 8)]
    for rows in (low, apart, other):
        found = lines(*rows)
        assert len(found) == len(ORDERS)
        assert not any("M, facts" in line for line in found)
    assert sum("not run yet: `" in line for line in found) == sum(order.tried for order in ORDERS)
    assert sum("not testable on these models: `" in line for line in found) == sum(not order.tried for order in ORDERS)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{order.better}>{order.worse}")
def test_commands_name_what_exists(order: Any) -> None:
    for method in (order.better, order.worse):
        find_candidate(Spec.parse(method))
    words = shlex.split(order.command)
    given = words[1:] if words[0] == "published_rows.py" else words[2:]
    options = dict(zip(given[::2], given[1::2], strict=True))
    if words[0] == "published_rows.py":
        known = {one["name"] for one in tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"]}
        assert set(options) == {"--rows"}
        assert set(options["--rows"].split(",")) <= known
    else:
        assert words[:2] == ["millpond", "eval"]
        shown = CliRunner().invoke(app, ["eval", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
        assert all(f"{name} " in shown for name in options)
        for method in options["--method"].split(","):
            find_candidate(Spec.parse(method))
