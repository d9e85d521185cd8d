"""The calibration file of a run's codecs: recorded, and checked when the run is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from millpond.codec.calibration import load_calibration
from millpond.errors import OptionError
from millpond.hf.calibration.load import needs_calibration
from millpond_lab.evals.decoding.record import Cell

#: What a run says of a calibration: file, sha256, model, bits, outliers, sinks.
Said = dict[str, Any]


def said_of(path: str) -> Said:
    """What a run records of a calibration file.

    Raises:
        DataError: it cannot be read, or is not a calibration.
    """
    known = load_calibration(path)
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return {
        "file": Path(path).name,
        "sha256": digest,
        "model": known.name,
        "bits": known.bits,
        "outliers": known.outliers,
        "sinks": known.sinks,
    }


def settled(folder: Path, before: Said | None, cells: Iterable[Cell], now: Said | None) -> Said | None:
    """The calibration of a folder whose run continues: what it was begun with, or what comes first.

    Args:
        before: what the folder says. cells: what it holds. now: what is given; None: no candidate needs one.

    Raises:
        OptionError: `now` is another calibration than that of cells in the folder.
    """
    if now is None or before == now or (before and before["sha256"] == now["sha256"]):
        return before or now
    if before is None and not any(needs_calibration(cell.codec) for cell in cells):
        return now
    told = f"calibration {before['file']} (sha256 {before['sha256'][:12]})" if before else "an unknown calibration"
    raise OptionError(
        f"{folder} holds a run with {told}, this one has {now['file']} (sha256 {now['sha256'][:12]}); name another "
        "folder with --out"
    )


def line(said: Said | None) -> str:
    """A line for people below a table; "" for none."""
    if said is None:
        return ""
    return f"Calibration: {said['file']}, sha256 {said['sha256']}, of a {said['model']}."
