"""Contents of a chunk store's folder, read without the model that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millpond.cache.chunks.file_format import content, header
from millpond.cache.chunks.files import mark_of, variant_files
from millpond.cache.chunks.variant import VariantFacts
from millpond.errors import DataError, OptionError


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a store.

    Attributes:
        size: in bytes. facts: what its header says; None for a file that is bad, and `why`.
    """

    path: Path
    size: int
    facts: VariantFacts | None
    why: str = ""


def list_files(folder: Path, *, verify: bool = False) -> list[StoredFile]:
    """The files of a store, by chunk; with `verify` every tensor is compared with its checksum.

    Raises:
        OptionError: the folder is no chunk store.
    """
    mark = mark_of(folder)
    if mark is None:
        raise OptionError(f"{str(folder)!r} is no chunk store: it has no store.json that names its model")
    return [_look(path, mark, verify) for path in sorted(variant_files(folder))]


def _look(path: Path, mark: str, verify: bool) -> StoredFile:
    chunk, size = path.parent.name, 0
    try:
        size = path.stat().st_size
        facts = content(path, mark, chunk)[0] if verify else header(path, mark, chunk)
    except (DataError, OSError) as error:
        return StoredFile(path, size, None, str(error))
    return StoredFile(path, size, facts)
