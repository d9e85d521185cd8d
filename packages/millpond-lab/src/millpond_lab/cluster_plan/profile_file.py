"""Profiles: step times of a model and the sizes of its cache, built in or in a JSON file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from millpond.budget import Budget
from millpond.cache.atomic_files import publish, write_part
from millpond.codec import Codec, Format, LayerCodecs, resolve
from millpond.errors import DataError, OptionError, unknown
from millpond.typed_json import parse_json, read_json
from millpond_lab.cluster_plan.layout import FREE_MOVES, STEP_TOKENS, CacheSize, MoveTimes
from millpond_lab.cluster_plan.profile import A100, DecodeTimes, StepTimes

#: Changes when the meaning of a field does.
FORMAT = 1
#: Prefix of the names of built-in profiles.
BUILT_IN = "a100:"
#: Layers and width of the models whose times are built in: keys and values of a token are 4 bytes x layers x width.
_SHAPES = {"opt-13b": (40, 5120, 128), "opt-66b": (64, 9216, 128)}
#: Most sizes of a worker in a file.
MOST_SIZES = 64
_WAY_OUT = "make one with 'millpond cluster profile'"


@dataclass(frozen=True, slots=True)
class Profile:
    """What a plan knows of a model on a kind of device.

    Attributes:
        name: of the model and the device. times: by the number of devices of one worker. cache: of a request.
        head_dim: numbers of a key, by which a number format has its size. fixed: whether the times were measured with
            this cache, so that no other can be planned. note: where the times come from. step_tokens: most tokens of a
            step that reads. moves: what a move occupies an engine for.
    """

    name: str
    times: Mapping[int, StepTimes]
    cache: CacheSize
    head_dim: int
    fixed: bool = False
    note: str = ""
    step_tokens: int = STEP_TOKENS
    moves: MoveTimes = FREE_MOVES

    def with_cache(self, budget: str | None, codec: str) -> Profile:
        """The same model with another budget and number format; step times stay those of the full cache, by entries.

        Raises:
            OptionError: the times were measured with a cache of their own; an unknown format or bad budget.
        """
        if budget is None and codec == "auto":
            return self
        if self.fixed:
            raise OptionError(f"profile {self.name} was measured with its own budget and codec; leave them out here")
        stored = resolve(codec)
        if isinstance(stored, LayerCodecs):
            n_layers, *_ = _SHAPES[self.name.removeprefix(BUILT_IN)]
            stored.check_layers(n_layers)
            bits = sum(self._bits(stored.of(layer)) for layer in range(n_layers)) / n_layers
        else:
            bits = self._bits(stored)
        cache = CacheSize(
            self.cache.entry_bytes,
            self.cache.entry_bytes * min(bits / 16, 1.0),
            None if budget is None else Budget.parse(budget),
            budget is None,
        )
        return replace(self, cache=cache)

    def _bits(self, stored: Format) -> float:
        """Of a number of a kept entry; at most those of one that is being read."""
        if isinstance(stored, Codec):
            return min(stored.bits_per_element(self.head_dim, self.head_dim), 16.0)
        return 16.0 if stored is None else min(8.0 * stored.itemsize, 16.0)


def built_in(name: str) -> Profile:
    """The published profile of a model on A100 devices: "opt-13b" or "opt-66b".

    Raises:
        OptionError: there is none of that name.
    """
    if name not in A100:
        raise unknown("built-in profile", name, A100)
    layers, width, head_dim = _SHAPES[name]
    note = "one A100 with 80 GB or more of them, as published with DistServe's simulator"
    per_token = 4.0 * layers * width
    return Profile(f"{BUILT_IN}{name}", A100[name], CacheSize(per_token, per_token), head_dim, note=note)


def load_profile(source: str) -> Profile:
    """A built-in profile ("a100:opt-13b") or that of a file.

    Raises:
        OptionError: no such built-in profile, or a file that cannot be opened. DataError: a file that is no profile.
    """
    if source.startswith(BUILT_IN):
        return built_in(source.removeprefix(BUILT_IN))
    return _profile(read_json(source, "profile", FORMAT, _WAY_OUT), source)


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile whole under another name and rename it.

    Raises:
        OptionError: the file cannot be written.
    """
    path = Path(path)
    try:
        publish(write_part(path, to_json(profile).encode()), path)
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}; name a folder that is there") from None


def to_json(profile: Profile) -> str:
    """A profile as JSON text that `from_json` reads."""
    cache = profile.cache
    data = {
        "format": FORMAT,
        "name": profile.name,
        "note": profile.note,
        "head_dim": profile.head_dim,
        "step_tokens": profile.step_tokens,
        "moves": asdict(profile.moves),
        "entry_bytes": cache.entry_bytes,
        "stored_bytes": cache.stored_bytes,
        "grows": cache.grows,
        "budget": None if cache.budget is None else _budget_text(cache.budget),
        "times": {str(n): asdict(times) for n, times in sorted(profile.times.items())},
    }
    return json.dumps(data, indent=1) + "\n"


def from_json(text: str | bytes, name: str = "profile") -> Profile:
    """The profile in a text of `to_json`.

    Raises:
        DataError: it is no JSON, of another format, or a field is missing or out of its range.
    """
    return _profile(parse_json(text, name, "profile", FORMAT, _WAY_OUT), name)


def _profile(found: dict[str, Any], name: str) -> Profile:
    """
    Raises:
        DataError: a field is missing or out of its range.
    """
    try:
        times = found["times"]
        if not isinstance(times, dict) or not 0 < len(times) <= MOST_SIZES:
            raise ValueError(f"times must hold 1 to {MOST_SIZES} sizes of a worker")
        budget = found["budget"]
        if budget is not None and not isinstance(budget, str):
            raise ValueError(f"budget={budget!r} must be a text or null")
        cache = CacheSize(
            _number(found, "entry_bytes"),
            _number(found, "stored_bytes"),
            None if budget is None else Budget.parse(budget),
            found["grows"] is True,
        )
        read = {_devices(key): _times(value) for key, value in times.items()}
        head_dim, step_tokens = (int(_number(found, name)) for name in ("head_dim", "step_tokens"))
        if step_tokens < 1:
            raise ValueError(f"step_tokens={step_tokens} must be at least 1")
        note = str(found.get("note", ""))[:1000]
        return Profile(str(found["name"])[:200], read, cache, head_dim, True, note, step_tokens, _moves(found))
    except KeyError as error:
        raise DataError(f"{name}: there is no field {error}; {_WAY_OUT}") from None
    except (ValueError, TypeError, OverflowError) as error:  # OptionError among them
        raise DataError(f"{name}: {error}; {_WAY_OUT}") from None


def _budget_text(budget: Budget) -> str:
    return f"{budget.amount}" if budget.kind == "tokens" else str(budget)


def _devices(key: str) -> int:
    if not (key.isdecimal() and 0 < int(key) <= 4096):
        raise ValueError(f"{key[:20]!r} is no number of devices from 1 to 4096")
    return int(key)


def _times(value: Any) -> StepTimes:
    parts = value["decode"]
    if not isinstance(parts, list) or len(parts) > MOST_SIZES:
        raise ValueError(f"decode must be a list of at most {MOST_SIZES} parts")
    decode = tuple(
        DecodeTimes(
            None if part["most"] is None else int(_number(part, "most")),
            _number(part, "base"),
            _number(part, "per_entry"),
            _number(part, "per_answer"),
        )
        for part in parts
    )
    names = ("read_base", "per_token", "per_square", "per_prompt")
    base, per_token, per_square, per_prompt = (_number(value, name) for name in names)
    return StepTimes(base, per_token, per_square, decode, per_prompt)


def _moves(found: Mapping[str, Any]) -> MoveTimes:
    """What a move costs; nothing in a file that was written before it was measured."""
    if "moves" not in found:
        return FREE_MOVES
    return MoveTimes(**{part.name: _number(found["moves"], part.name) for part in fields(MoveTimes)})


def _number(found: Mapping[str, Any], name: str) -> float:
    value = found[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={str(value)[:40]} must be a number of at least 0")
    return float(value)
