"""Models that Millpond knows by name, in the arguments of `vllm serve`."""

from __future__ import annotations

from collections.abc import Sequence

import millpond as mp

#: Flags under which vLLM takes the model, and the name that it serves it under.
_MODEL, _SERVED = "--model", "--served-model-name"


def with_model_folder(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the folder of a model in place of its name, if `millpond models list` has it.

    vLLM serves the model under that name, unless the arguments give another. Folders and hub ids stay as they are.

    Args:
        arguments: Arguments of `vllm serve`, the model first or behind `--model`.

    Raises:
        OptionError: the model was not downloaded, or its package is not installed.

    Example:
        >>> with_model_folder(["Qwen/Qwen3-8B", "-tp", "2"])
        ['Qwen/Qwen3-8B', '-tp', '2']
    """
    place = _place(arguments)
    if place is None:
        return list(arguments)
    flag = f"{_MODEL}=" if arguments[place].startswith(f"{_MODEL}=") else ""
    name = arguments[place].removeprefix(flag)
    folder = mp.model_folder(name)
    if folder is None:
        return list(arguments)
    named = [*arguments[:place], flag + folder, *arguments[place + 1 :]]
    served = any(part.partition("=")[0].replace("_", "-") == _SERVED for part in arguments)
    return named if served else [*named, _SERVED, name]


def _place(arguments: Sequence[str]) -> int | None:
    """Return the index of the argument that names the model."""
    if arguments and not arguments[0].startswith("-"):
        return 0
    for place, part in enumerate(arguments):
        if part.startswith(f"{_MODEL}="):
            return place
        if part == _MODEL and place + 1 < len(arguments):
            return place + 1
    return None
