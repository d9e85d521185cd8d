"""Sizes, budgets and reports, as several benchmarks take and write them."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from millpond.budget import Budget
from millpond.errors import OptionError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from millpond_lab.bench.generate.saved_model import SavedModel

    Plan = TypeVar("Plan", bound=DataclassInstance)


def with_given(plan: Plan, **given: Any) -> Plan:
    """`plan` with the values that were given; None is none."""
    return replace(plan, **{name: value for name, value in given.items() if value is not None})


def check_share(budget: str) -> None:
    """
    Raises:
        OptionError: the budget is no share of the prompt.
    """
    if Budget.parse(budget).kind != "ratio":
        raise OptionError(f"budget {budget!r}: the benchmark compares at a share of the prompt, such as 20%")


def parse_cells(text: str | None) -> tuple[tuple[int, int], ...] | None:
    """((1, 2048), (4, 2048)) from "1x2048,4x2048"; None from None.

    Raises:
        OptionError: not BATCHxPROMPT.
    """
    if text is None:
        return None
    cells = []
    for part in text.split(","):
        batch, _, prompt = part.strip().partition("x")
        if not (batch.isdecimal() and prompt.isdecimal() and int(batch) and int(prompt)):
            raise OptionError(f"cell {part.strip()!r} must read BATCHxPROMPT, for example 4x2048")
        cells.append((int(batch), int(prompt)))
    return tuple(cells)


def saved_model(name: str | None) -> SavedModel | None:
    """The model that `--model` names; None from None.

    Raises:
        OptionError: nothing on this machine.
    """
    from millpond_lab.bench.generate.saved_model import SavedModel

    return None if name is None else SavedModel.of(name)


def command_line(but: str | None = None) -> str:
    """What the user typed, without the path of the program, and without an option and its value."""
    words = sys.argv[1:]
    if but in words:
        words = [*words[: words.index(but)], *words[words.index(but) + 2 :]]
    return shlex.join(["millpond", *words])


def deliver(name: str, data: dict[str, Any], text: str, out: Path | None) -> None:
    """Print a report, and write it where a folder is given."""
    from millpond_lab.bench.common.report import write_report

    typer.echo(text)
    for file in write_report(out, name, data, text) if out else []:
        typer.echo(f"wrote {file}")
