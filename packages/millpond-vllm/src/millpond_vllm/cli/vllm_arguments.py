"""Arguments of `vllm serve`: the user's own, unchanged, and those with which it evicts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond import OptionError
from millpond.plugins import brief
from millpond_vllm.settings import KEY

_CONFIG, _PROCESSORS = "--additional-config", "--logits-processors"


def split_arguments(arguments: Sequence[str], flags: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return our own arguments and the rest, each in the order given.

    Args:
        arguments: Arguments of the command.
        flags: Our own flags, and whether each takes a value.

    Example:
        >>> split_arguments(["model", "--budget", "20%", "-tp", "2"], {"--budget": True})
        (['--budget', '20%'], ['model', '-tp', '2'])
    """
    own, rest = [], []
    parts = iter(arguments)
    for part in parts:
        flag = part.partition("=")[0] if part.startswith("--") else part
        if flag not in flags:
            rest.append(part)
            continue
        own.append(part)
        if flags[flag] and flag == part:
            own.extend([value] if (value := next(parts, None)) is not None else [])
    return own, rest


def vllm_arguments(given: Sequence[str], engine: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `vllm serve`.

    An `--additional-config` and `--logits-processors` of the user's own are merged with ours. With speculative decoding
    the check of requests is left out, which vLLM refuses there as it refuses all custom processors of logits.

    Args:
        given: The user's arguments, without ours.
        engine: What `millpond_vllm.engine_args` returned.

    Raises:
        OptionError: the user gives a scheduler, a worker or settings of millpond too, or a configuration that cannot
            be read.
    """
    flags = _Flags.read(given)
    for name in ("--scheduler-cls", "--worker-cls"):
        if flags.values(name):
            raise OptionError(
                f"{name} {brief(flags.values(name)[-1])}: eviction needs millpond's own class there; leave {name} out, "
                "or start that class with `vllm serve`, without eviction"
            )
    kept, added = list(given), ["--scheduler-cls", engine["scheduler_cls"], "--worker-cls", engine["worker_cls"]]
    if not any(name == "-sc" or name.startswith("--spec") for name in flags.names()):
        others = flags.values(_PROCESSORS)
        kept = _without(kept, _PROCESSORS)
        added += [_PROCESSORS, *others, *engine["logits_processors"]]
    return kept + added + _config_arguments(flags, engine["additional_config"])


def unused_settings(arguments: Sequence[str]) -> bool:
    """Whether a command line gives settings of millpond, and not its scheduler and worker."""
    try:
        flags = _Flags.read(arguments)
        whole = any(KEY in _mapping(text) for text in flags.values(_CONFIG))
    except OptionError:  # another program's, or an error that vLLM reports
        return False
    if not whole and not any(name.startswith(f"{_CONFIG}.{KEY}") for name in flags.names()):
        return False
    return not all("millpond_vllm" in "".join(flags.values(name)) for name in ("--scheduler-cls", "--worker-cls"))


def _config_arguments(flags: _Flags, ours: Mapping[str, Any]) -> list[str]:
    """Return the additional configuration: dotted where the user's is, which vLLM then merges."""
    theirs: dict[str, Any] = {}
    for text in flags.values(_CONFIG)[-1:]:
        theirs = _mapping(text)
    dotted = [name for name in flags.names() if name.startswith(f"{_CONFIG}.")]
    if KEY in theirs or any(name.split(".")[1] == KEY for name in dotted):
        raise OptionError(
            f"{_CONFIG} has settings under {KEY!r}, which --method, --budget and the other options of "
            "`millpond-vllm serve` write; leave them out of it"
        )
    if dotted:  # vLLM takes them in place of a whole one
        return [f"{_CONFIG}.{KEY}", json.dumps(ours[KEY])]
    return [_CONFIG, json.dumps({**theirs, **ours})]


def _mapping(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{_CONFIG} {brief(text)} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise OptionError(f"{_CONFIG} {brief(text)} must be a JSON object, such as '{{\"a\": 1}}'")
    return found


@dataclass(frozen=True, slots=True)
class _Flags:
    """Flags of `vllm serve` with their values, those of its --config file first."""

    found: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def read(cls, arguments: Sequence[str]) -> _Flags:
        """Return the flags of a command line."""
        own = tuple(_pairs(arguments))
        files = [values[0] for name, values in own if name == "--config" and values]
        return cls((*(pair for file in files for pair in _file_pairs(file)), *own))

    def names(self) -> list[str]:
        """Return the names, `--like-this`."""
        return [name for name, _ in self.found]

    def values(self, name: str) -> list[str]:
        """Return the values of a flag the last time that it is given."""
        return list(next((values for found, values in reversed(self.found) if found == name), ()))


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    name: str | None = None
    values: list[str] = []
    for part in arguments:
        if part.startswith("-") and len(part) > 1:
            if name is not None:
                yield name, tuple(values)
            flag, separator, value = part.partition("=")
            name, values = _spelled(flag), [value] if separator else []
        else:
            values.append(part)
    if name is not None:
        yield name, tuple(values)


def _spelled(flag: str) -> str:
    """Return a flag as vLLM names it: dashes for underscores in front of a dot."""
    head, dot, tail = flag.partition(".")
    return (head.replace("_", "-") if head.startswith("--") else head) + dot + tail


def _file_pairs(file: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the flags of a file that `vllm serve --config` reads."""
    import yaml  # type: ignore[import-untyped]

    try:
        found = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"--config {file!r} cannot be read: {error}") from error
    for key, value in (found if isinstance(found, dict) else {}).items():
        many = value if isinstance(value, list) else [value]
        texts = (json.dumps(one) if isinstance(one, dict) else str(one) for one in many)
        yield _spelled(f"--{key}"), tuple(texts)


def _without(arguments: Sequence[str], name: str) -> list[str]:
    """Return arguments without a flag and its values."""
    kept, inside = [], False
    for part in arguments:
        if part.startswith("-") and len(part) > 1:
            inside = _spelled(part.partition("=")[0]) == name
        if not inside:
            kept.append(part)
    return kept
