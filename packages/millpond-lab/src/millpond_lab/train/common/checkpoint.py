"""Common parts of the recipes: checkpoints with atomic writes, the loss curve, CPU threads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch


def save_state(state: dict[str, Any], file: Path) -> None:
    """Write a checkpoint; a crash while writing leaves the older file whole."""
    fresh = file.with_suffix(".new")
    torch.save(state, fresh)
    fresh.replace(file)


def save_curve(log: Iterable[NamedTuple], file: Path) -> None:
    """Write the learning curve, one JSON line a point."""
    file.write_text("".join(json.dumps(line._asdict()) + "\n" for line in log), encoding="utf-8")


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Hold torch to `count` CPU threads inside; None leaves them as they are."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
