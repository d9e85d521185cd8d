"""JSON files of plans and profiles: read within a limit, and of one version."""

from __future__ import annotations

import json
from typing import Any

from millpond.errors import DataError
from millpond.option_files import read_file

#: Most bytes of a file.
MAX_BYTES = 1 << 20


def read_json(path: str, what: str, version: int, way_out: str) -> dict[str, Any]:
    """Return the object that a file holds, see `parse_json`.

    Raises:
        OptionError: it cannot be opened.
        DataError: it is too large, or as `parse_json`.
    """
    raw = read_file(path)
    if len(raw) > MAX_BYTES:
        raise DataError(f"{path}: {len(raw):,} bytes, a {what} has at most {MAX_BYTES:,}; {way_out}")
    return parse_json(raw, path, what, version, way_out)


def parse_json(text: str | bytes, name: str, what: str, version: int, way_out: str) -> dict[str, Any]:
    """Return the object of a JSON text whose field `format` is `version`.

    Args:
        text: The text.
        name: Name of the text, for messages.
        what: Kind of the text, for messages.
        version: Version that it must have.
        way_out: What to do, for messages.

    Raises:
        DataError: it is no JSON, or of another format.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: no JSON: {error}; {way_out}") from None
    if not isinstance(data, dict) or data.get("format") != version:
        raise DataError(f"{name}: not a {what} of this version; {way_out}")
    return data
