"""One file of a chunk store: a safetensors file whose header is sealed and whose tensors have checksums.

The header holds the format, the mark of the model, what is known of the variant, and a checksum of each tensor, all
under a checksum of their own.
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
from millpond.typed_json import as_type

#: Name of the format of the files, and of the file that names the model of a folder.
FORMAT = "millpond-chunk-1"
#: Longest header that is read, in bytes.
MOST_HEADER = 16 << 20


class TornFileError(DataError):
    """A file that is cut or not as it was written."""


class ForeignFileError(DataError):
    """A file of another model, format or chunk."""


def serialized(variant: StoredVariant, mark: str) -> bytes:
    """The bytes of the file of a variant."""
    tensors = {name: t.contiguous() for name, t in variant.tensors.items()}
    sums = {name: _checksum(name, t) for name, t in tensors.items()}
    about = json.dumps({"format": FORMAT, "mark": mark, "facts": asdict(variant.facts), "tensors": sums})
    return save(tensors, {"about": about, "seal": _seal(about)})


def header(path: Path, mark: str, chunk: str) -> VariantFacts:
    """What the header of a file says.

    Raises:
        TornFileError: it is not as it was written. ForeignFileError: of another model or chunk. OSError: it is gone.
    """
    with path.open("rb") as file:
        first = file.read(8)
        return _facts(_parse(first + file.read(min(int.from_bytes(first, "little"), MOST_HEADER))), mark, chunk)


def content(path: Path, mark: str, chunk: str) -> tuple[VariantFacts, dict[str, Tensor]]:
    """Facts and tensors of a file, verified. The file is read whole, so that one that is cut later harms nothing.

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
    """
    Raises:
        ForeignFileError: of another model or chunk.
    """
    if about.get("format") != FORMAT or about.get("mark") != mark:
        raise ForeignFileError("a file of another model or format")
    try:
        facts: VariantFacts = as_type(VariantFacts, about["facts"])
    except TypeError as error:
        raise ForeignFileError(f"its header says nothing of a chunk: {error}") from error
    if facts.chunk != chunk:
        raise ForeignFileError("a file of another chunk")
    return facts


def _parse(data: bytes) -> dict[str, Any]:
    """What is said in the header of a file that begins with `data`.

    Raises:
        TornFileError: it is not as it was written. ForeignFileError: it is no file of a chunk store.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 8 < end <= min(len(data), 8 + MOST_HEADER):
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
        found: dict[str, Any] = json.loads(about)
        known = {"format", "mark", "facts", "tensors"} <= found.keys()
    except (ValueError, AttributeError) as error:
        raise ForeignFileError(f"its header says nothing of a chunk: {error}") from error
    if not known:
        raise ForeignFileError("its header says nothing of a chunk")
    return found


def _seal(about: str) -> str:
    return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()


def _checksum(name: str, tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
