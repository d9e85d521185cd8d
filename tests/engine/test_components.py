"""The parts of an engine: closed in the reverse order of their opening, once, and where a later one fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.cache.swap import SwapFiles
from millpond.cache.tiered.block_store import BlockStore
from millpond.engine.engine import Engine
from millpond.engine.file_loads import FileLoads
from millpond.engine.sessions.store import SessionStore
from millpond.errors import DataError
from millpond.runner.packed_model import PackedModel
from tests.helpers.engine.helpers import engine_for, shared_model

#: In the order in which they are opened.
PARTS = (PackedModel, SwapFiles, BlockStore, SessionStore, FileLoads)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts that are closed from now on."""
    names: list[str] = []
    for kind in PARTS:
        close = kind.close

        def noted(part: object, close: object = close, name: str = kind.__name__) -> None:
            names.append(name)
            close(part)  # type: ignore[operator]

        monkeypatch.setattr(kind, "close", noted)
    return names


def settings(folder: Path) -> dict[str, object]:
    return {
        "swap_to": folder,
        "prefix_cache": True,
        "prefix_disk": "1MiB",
        "prefix_folder": folder,
        "cache_dir": folder,
    }


def test_parts_are_closed_in_reverse_order_and_once(closed: list[str], tmp_path: Path) -> None:
    engine = engine_for("full", **settings(tmp_path))
    assert closed == []
    engine.close()
    assert closed == [kind.__name__ for kind in reversed(PARTS)]
    engine.close()
    assert len(closed) == len(PARTS)


@pytest.mark.parametrize(("failing", "n_opened"), [(SessionStore, 3), (FileLoads, 4)])
def test_what_was_opened_is_closed_where_a_later_part_fails(
    failing: type, n_opened: int, closed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise DataError("the disk is broken")

    monkeypatch.setattr(failing, "__init__", fails)
    with pytest.raises(DataError, match="the disk is broken"):
        Engine(shared_model("llama"), method="full", **settings(tmp_path))  # type: ignore[arg-type]
    assert closed == [kind.__name__ for kind in reversed(PARTS[:n_opened])]
