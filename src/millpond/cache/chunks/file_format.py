"""File of a chunk store: a safetensors file whose header is sealed and whose tensors have checksums.

The header holds the format, the mark of the model, the facts of the variant, and a checksum of each tensor, all under a
checksum of their own.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from millpond.cache.chunks.variant import StoredVariant, VariantFacts
from millpond.errors import DataError

#: Name of the format of the files, and of the file that names the model of a folder.
FORMAT = "millpond-chunk-1"
#: Bytes of the longest header that is read.
MAX_HEADER = 16 << 20


class TornFileError(DataError):
    """A file that is cut or not as it was written."""


class ForeignFileError(DataError):
    """A file of another model, format or chunk."""


def serialized(variant: StoredVariant, mark: str) -> bytes:
    """Return the bytes of the file of a variant."""
    tensors = {name: t.contiguous() for name, t in variant.tensors.items()}
    sums = {name: _checksum(name, t) for name, t in tensors.items()}
    about = json.dumps({"format": FORMAT, "mark": mark, "facts": asdict(variant.facts), "tensors": sums})
    return save(tensors, {"about": about, "seal": _seal(about)})


def header(path: Path, mark: str, chunk: str) -> VariantFacts:
    """Return the facts in the header of a file.

    Raises:
        TornFileError: it is not as it was written.
        ForeignFileError: it is of another model or chunk.
        OSError: it is missing.
    """
    with path.open("rb") as file:
        first = file.read(8)
        return _facts(_parse(first + file.read(min(int.from_bytes(first, "little"), MAX_HEADER))), mark, chunk)


def content(path: Path, mark: str, chunk: str) -> tuple[VariantFacts, dict[str, Tensor]]:
    """Return the facts and tensors of a file, verified.

    The file is read at once, so that one that is cut later harms nothing.

    Raises:
        TornFileError, ForeignFileError, OSError: as `header`.
    """
    data = path.read_bytes()
    about = _parse(data)
    facts = _facts(about, mark, chunk)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise TornFileError(f"{path.name} cannot be read: {error}") from error
    if set(tensors) != set(about["tensors"]):
        raise TornFileError(f"{path.name} holds other tensors than it says")
    for name, tensor in tensors.items():
        if _checksum(name, tensor) != about["tensors"][name]:
            raise TornFileError(f"{path.name}: {name} is not as it was written")
    return facts, tensors


def _facts(about: dict[str, Any], mark: str, chunk: str) -> VariantFacts:
    """Return the facts of a parsed header.

    Raises:
        ForeignFileError: of another model or chunk.
    """
    if about.get("format") != FORMAT or about.get("mark") != mark:
        raise ForeignFileError("a file of another model or format")
    fields = dict(about["facts"])
    fields |= {name: tuple(fields[name]) for name in ("before", "received")}
    facts = VariantFacts(**fields)
    if facts.chunk != chunk:
        raise ForeignFileError("a file of another chunk")
    return facts


def _parse(data: bytes) -> dict[str, Any]:
    """Return the content of the header of a file that begins with `data`.

    Raises:
        TornFileError: it is not as it was written.
        ForeignFileError: it is no file of a chunk store.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 8 < end <= min(len(data), 8 + MAX_HEADER):
        raise TornFileError("the file is cut")
    try:
        metadata = json.loads(data[8:end])["__metadata__"]
        about, seal = metadata["about"], metadata["seal"]
        intact = _seal(about) == seal
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TornFileError(f"its header cannot be read: {error}") from error
    if not intact:
        raise TornFileError("its header is not as it was written")
    try:
        about_fields: dict[str, Any] = json.loads(about)
        is_complete = {"format", "mark", "facts", "tensors"} <= about_fields.keys()
    except (ValueError, AttributeError) as error:
        raise ForeignFileError(f"its header says nothing of a chunk: {error}") from error
    if not is_complete:
        raise ForeignFileError("its header says nothing of a chunk")
    return about_fields


def _seal(about: str) -> str:
    return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()


def _checksum(name: str, tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
