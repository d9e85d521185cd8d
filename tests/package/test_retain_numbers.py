"""The tables of the text models in docs/how-to/retaining-heads.md are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "how-to" / "retaining-heads.md").read_text(encoding="utf-8")
SECTION = SECTION[SECTION.index("### The bundled text models") : SECTION.index("## Evict while a prompt is read")]
TEXT, FACTS = SECTION.split("**Facts**")


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a committed result."""
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return found


def options(method: str) -> frozenset[str]:
    """A method and its options, in any order."""
    return frozenset(method.split(":"))


def shown(page: str) -> dict[frozenset[str], list[str]]:
    """The rows of a table whose first cell names a method; an entry per method, or per method and its budget."""
    found: dict[frozenset[str], list[str]] = {}
    for line in page.splitlines():
        name = re.match(r"\| `([^`]+)`", line)
        if name:
            found[options(name[1])] = [cell.strip() for cell in line.strip().strip("|").split("|")[1:]]
    return found


@pytest.mark.parametrize(("result", "column"), [("text", 1), ("ada", 2), ("streaming", 3)])
def test_perplexities_of_running_text(result: str, column: int) -> None:
    page = shown(TEXT)
    checked = 0
    for row in rows(f"retain-pond-long-{result}"):
        cells = page.get(options(row["method"]))
        if cells is None or len(cells) <= column or not cells[column]:
            continue
        checked += 1
        if result == "text":
            assert cells[column] == f"{row['perplexity']:.2f}"
        else:
            numbers = [float(n) for n in re.findall(r"[+-]?\d+\.\d", cells[column])]
            assert numbers == [round(100 * row[name], 1) + 0.0 for name in ("more", "low", "high")]
    assert checked >= 11


def test_shares_of_facts() -> None:
    page = shown(FACTS)
    checked = 0
    for row in rows("retain-pond-long-recall"):
        cells = page.get(options(row["method"]))
        if row["method"] == "full" or cells is None:
            continue
        score = row["score"]
        shown_as = f"{score['mean']:.3f} ({score['low']:.2f} to {score['high']:.2f})"
        assert shown_as == cells[row["budget"] == "10%" or row["method"] == "attention_gate"]
        checked += 1
    assert checked == 20
