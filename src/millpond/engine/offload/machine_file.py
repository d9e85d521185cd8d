"""File of a machine's constants in the user's cache folder: written whole or not at all, checked when it is read."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from millpond.engine.offload.machine import ROWS, WEIGHTS, MachineConstants
from millpond.engine.offload.measure import hardware, measure
from millpond.models.cache_folder import cache_folder
from millpond.models.weights.packed_file import Report
from millpond.option_files import read_file
from millpond.typed_json import as_type

#: Changes when the meaning of a field does.
FORMAT = 2
_MOST_BYTES = 65536


def machine_constants(
    folder: Path,
    *,
    again: bool = False,
    report: Report | None = None,
    file: Path | None = None,
    measured_by: Callable[..., Any] = measure,
) -> MachineConstants:
    """The constants of this machine for a folder: from its file, or measured and written there.

    A file of other hardware, another number of threads or another folder counts as none, and so does a damaged one.

    Args:
        again: measure in any case. report: shown how far it is. file: see `measure`. measured_by: measures.

    Raises:
        OptionError: see `measure`.
    """
    place = path_of(folder, file)
    known = None if again else read(place)
    if known is not None and known.folder == str(folder.resolve()) and known.hardware == hardware():
        return known
    found: MachineConstants = measured_by(folder, report, *([] if file is None else [file]))
    write(place, found)
    return found


def path_of(folder: Path, file: Path | None = None) -> Path:
    """Where the constants of a folder are kept, for the present number of threads, and of a file that is read there."""
    key = json.dumps([str(folder.resolve()), hardware(), torch.get_num_threads(), *([] if file is None else ["read"])])
    return cache_folder() / "machine" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def write(place: Path, constants: MachineConstants) -> None:
    """Write a file under another name and rename it; a cache folder that cannot be written is no error."""
    fields = {name: value for name, value in asdict(constants).items() if not name.startswith("_")}
    text = json.dumps({"format": FORMAT, **fields}, indent=1)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", dir=place.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, place)
        except BaseException:
            os.unlink(name)
            raise
    except OSError:
        return


def read(place: Path) -> MachineConstants | None:
    """The constants in a file; None where there is none, or it is not one that `write` made whole."""
    try:
        content = read_file(place)
        return _checked(json.loads(content)) if len(content) <= _MOST_BYTES else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _checked(found: dict[str, Any]) -> MachineConstants:
    """
    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is none.
    """
    if found.pop("format") != FORMAT or found.keys() != {one.name for one in fields(MachineConstants) if one.init}:
        raise ValueError("another format")
    constants: MachineConstants = as_type(MachineConstants, found)
    if constants.accelerator is not None or constants.flops.keys() != set(WEIGHTS):
        raise ValueError("another machine")
    if any(tuple(sorted(table)) != ROWS for table in constants.flops.values()):
        raise ValueError("other rows")
    return constants
