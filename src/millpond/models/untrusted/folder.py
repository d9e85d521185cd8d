"""Check of a model's folder before anything of it is loaded: no links out of it, no text that is endless or deep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millpond.errors import DataError, OptionError
from millpond.models.weights.layout import check_shards

#: Bytes of a JSON file at most: the largest vocabularies have some tens of MB, all others are short.
_MAX_BYTES, _MAX_VOCABULARY = 16 << 20, 512 << 20
_VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "added_tokens.json"})
#: Bytes of a chat template at most.
_MAX_TEMPLATE = 1 << 20
#: Brackets inside each other in a JSON file at most.
_MAX_DEPTH = 64
#: Folders inside a model's that transformers reads.
_INNER = ("additional_chat_templates", "custom_generate")


def check_model_folder(folder: Path) -> None:
    """Refuse a folder with files elsewhere, or unreadable in bounded time and memory.

    Raises:
        DataError: a link to a file outside of the folder, a file that is longer than any of its kind, or JSON that is
            damaged or too deep, or names shards that lie elsewhere. OptionError: the folder cannot be read.
    """
    try:
        files = [file for place in (folder, *(folder / name for name in _INNER)) for file in _files_of(place)]
    except OSError as error:
        raise OptionError(f"{folder} cannot be read: {error.strerror}") from error
    homes = _homes(folder)
    for file in files:
        _check_home(file, homes)
        if file.suffix == ".jinja":
            _check_length(file, _MAX_TEMPLATE)
        elif file.suffix == ".json":
            _check_length(file, _MAX_VOCABULARY if file.name in _VOCABULARIES else _MAX_BYTES)
            if file.name not in _VOCABULARIES:  # whose readers bound the depth
                content = read_json(file)
                if file.name.endswith(".index.json") and isinstance(content, dict):
                    check_shards(file, _inside(content.get("weight_map")))


def read_json(path: Path) -> Any:
    """Return the content of a short JSON file.

    Raises:
        DataError: it cannot be read, is no JSON, or is deeper than any that a model needs.
    """
    try:
        content = json.loads(path.read_bytes())
    except RecursionError as error:
        raise DataError(f"{path} has more than {_MAX_DEPTH} brackets inside each other; it is no model's") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no JSON ({error}); the file is damaged") from error
    level = [content]
    for _ in range(_MAX_DEPTH):
        level = [inner for node in level for inner in _inside(node)]
        if not level:
            return content
    raise DataError(f"{path} has more than {_MAX_DEPTH} brackets inside each other; it is no model's")


def _inside(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _files_of(folder: Path) -> list[Path]:
    """Return the files and links of a folder; none if it does not exist."""
    return [path for path in folder.iterdir() if path.is_symlink() or path.is_file()] if folder.is_dir() else []


def _homes(folder: Path) -> list[Path]:
    """Return the folders that its files may be in: itself, and that of the hub's snapshots."""
    resolved = folder.resolve()
    return [resolved, resolved.parent.parent / "blobs"] if resolved.parent.name == "snapshots" else [resolved]


def _check_home(file: Path, homes: list[Path]) -> None:
    try:
        real = file.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise DataError(f"{file} is a link to nothing; put the file itself there") from error
    if not any(real.is_relative_to(home) for home in homes):
        raise DataError(f"{file} lies outside of the model's folder, at {real}; put the file itself there")


def _check_length(file: Path, max_bytes: int) -> None:
    size = file.stat().st_size
    if size > max_bytes:
        raise DataError(
            f"{file} has {size:,} bytes, and none of its kind has more than {max_bytes:,}; it is no model's"
        )
