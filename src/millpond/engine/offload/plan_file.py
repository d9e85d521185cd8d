"""Plans as JSON: written whole, and checked field by field when they are read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from millpond.cache.atomic_files import publish, write_part
from millpond.engine.offload.plan import TIERS, Plan
from millpond.engine.offload.prediction import Prediction
from millpond.errors import DataError, OptionError, unknown
from millpond.option_files import read_file

#: Changes when the meaning of a field does.
FORMAT = 1
#: Most bytes of a plan.
MOST_BYTES = 1 << 20


def to_json(plan: Plan) -> str:
    """A plan as JSON text that `from_json` reads."""
    return json.dumps({"format": FORMAT, **asdict(plan)}, indent=1) + "\n"


def from_json(text: str | bytes) -> Plan:
    """A plan from the text of `to_json`, or one written by hand: every field may be left out.

    Raises:
        DataError: it is no JSON object, of another format, or a prediction is damaged. OptionError: an unknown field,
            or a value that `Plan` refuses.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"plan: no JSON: {error}; make one with 'millpond plan --json'") from error
    if not isinstance(found, dict):
        raise DataError(f"plan: {type(found).__name__} in place of a JSON object with fields such as weights and kv")
    if found.pop("format", FORMAT) != FORMAT:
        raise DataError("plan: of another version of this package; make one with 'millpond plan --json'")
    known = [field.name for field in fields(Plan)]
    for name in found:
        if name not in known:
            raise unknown("field of a plan", name, known)
    if not isinstance(found.get("model", ""), str):
        raise OptionError(f"plan: model={found['model']!r} must be a fingerprint, or be left out")
    given = found.pop("prediction", None)
    return Plan(**found, prediction=None if given is None else _prediction(given))


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan whole under another name and rename it.

    Raises:
        OptionError: the file cannot be written.
    """
    place = Path(path)
    try:
        publish(write_part(place, to_json(plan).encode()), place)
    except OSError as error:
        raise OptionError(f"{place} cannot be written: {error.strerror or error}") from error


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """A plan from a file.

    Raises:
        OptionError: it cannot be read; or see `from_json`. DataError: see `from_json`.
    """
    content = read_file(path)
    if len(content) > MOST_BYTES:
        raise DataError(f"{os.fspath(path)}: {len(content):,} bytes are too many for a plan (at most {MOST_BYTES:,})")
    return from_json(content)


def _prediction(given: Any) -> Prediction:
    """
    Raises:
        DataError: it is not what `to_json` writes.
    """
    try:
        texts = {name: given[name] for name in ("prefill_bound", "decode_bound")}
        numbers = {field.name: given[field.name] for field in fields(Prediction) if field.type == "float"}
        of_bytes = {tier: {str(name): n for name, n in parts.items()} for tier, parts in given["bytes"].items()}
        what_if = {str(name): value for name, value in given["what_if"].items()}
        good = (
            set(given) == {field.name for field in fields(Prediction)}
            and all(isinstance(text, str) for text in texts.values())
            and all(map(_is_rate, [*numbers.values(), *what_if.values()]))
            and all(tier in TIERS and all(map(_is_count, parts.values())) for tier, parts in of_bytes.items())
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"plan: a damaged prediction ({error!r}); leave it out") from error
    if not good:
        raise DataError("plan: a damaged prediction; leave it out")
    parts: Mapping[str, Any] = {**texts, **numbers, "bytes": of_bytes, "what_if": what_if}
    return Prediction(**parts)


def _is_rate(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int) and value >= 0
