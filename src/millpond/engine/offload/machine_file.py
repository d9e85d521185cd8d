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

#: Version of the file: changes when the meaning of a field does.
FORMAT = 2
_MAX_BYTES = 65536


def machine_constants(
    folder: Path,
    *,
    again: bool = False,
    report: Report | None = None,
    file: Path | None = None,
    measured_by: Callable[..., Any] = measure,
) -> MachineConstants:
    """Return the constants of this machine for a folder, from its file or measured.

    Measured ones are written to the file. A file of other hardware, another number of threads or another folder counts
    as none, and so does a damaged one.

    Args:
        folder: The folder.
        again: Measure in any case.
        report: Called with the progress.
        file: File to read, see `measure`.
        measured_by: Function that measures.

    Raises:
        OptionError: see `measure`.
    """
    path = path_of(folder, file)
    stored = None if again else read(path)
    if stored is not None and stored.folder == str(folder.resolve()) and stored.hardware == hardware():
        return stored
    measured: MachineConstants = measured_by(folder, report, *([] if file is None else [file]))
    write(path, measured)
    return measured


def path_of(folder: Path, file: Path | None = None) -> Path:
    """Return the path of the constants of a folder, for the present number of threads.

    Args:
        folder: The folder.
        file: File that is read there; None: none.
    """
    key = json.dumps([str(folder.resolve()), hardware(), torch.get_num_threads(), *([] if file is None else ["read"])])
    return cache_folder() / "machine" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def write(path: Path, constants: MachineConstants) -> None:
    """Write a file under another name and rename it.

    A cache folder that cannot be written is no error.
    """
    fields = {name: value for name, value in asdict(constants).items() if not name.startswith("_")}
    text = json.dumps({"format": FORMAT, **fields}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError:
        return


def read(path: Path) -> MachineConstants | None:
    """Return the constants in a file; None if there is no file, or `write` did not finish it."""
    try:
        content = read_file(path)
        return _checked(json.loads(content)) if len(content) <= _MAX_BYTES else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _checked(parsed: dict[str, Any]) -> MachineConstants:
    """Return the constants in parsed JSON.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it does not hold such constants.
    """
    if parsed.pop("format") != FORMAT or parsed.keys() != {
        constant.name for constant in fields(MachineConstants) if constant.init
    }:
        raise ValueError("another format")
    constants: MachineConstants = as_type(MachineConstants, parsed)
    if constants.accelerator is not None or constants.flops.keys() != set(WEIGHTS):
        raise ValueError("another machine")
    if any(tuple(sorted(table)) != ROWS for table in constants.flops.values()):
        raise ValueError("other rows")
    return constants
