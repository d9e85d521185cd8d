"""Format of the files of a chunk store, read whole or layer by layer, and verified.

A file is safetensors. Its header holds the format, the mark of the model, the facts of the variant, and a checksum
of each tensor, all under a checksum of their own. The tensors of each layer have extents there.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from millpond.cache.chunks.variant import StoredShape, StoredVariant, VariantFacts
from millpond.errors import DataError
from millpond.typed_json import as_type

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
    sums = {name: checksum(name, t) for name, t in tensors.items()}
    about = json.dumps({"format": FORMAT, "mark": mark, "facts": asdict(variant.facts), "tensors": sums})
    return save(tensors, {"about": about, "seal": seal_of(about)})


def header(path: Path, mark: str, chunk: str) -> VariantFacts:
    """Return the facts in the header of a file.

    Raises:
        TornFileError: it is not as it was written.
        ForeignFileError: it is of another model or chunk.
        OSError: it is missing.
    """
    with path.open("rb") as file:
        first = file.read(8)
        return facts_of(parse(first + file.read(min(int.from_bytes(first, "little"), MAX_HEADER))), mark, chunk)


def content(path: Path, mark: str, chunk: str) -> tuple[VariantFacts, dict[str, Tensor]]:
    """Return the facts and tensors of a file, verified.

    The file is read at once, so that one that is cut later harms nothing.

    Raises:
        TornFileError, ForeignFileError, OSError: as `header`.
    """
    data = path.read_bytes()
    about = parse(data)
    facts = facts_of(about, mark, chunk)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise TornFileError(f"{path.name} cannot be read: {error}") from error
    if set(tensors) != set(about["tensors"]):
        raise TornFileError(f"{path.name} holds other tensors than it says")
    for name, tensor in tensors.items():
        if checksum(name, tensor) != about["tensors"][name]:
            raise TornFileError(f"{path.name}: {name} is not as it was written")
    return facts, tensors


def facts_of(about: dict[str, Any], mark: str, chunk: str) -> VariantFacts:
    """Return the facts of a parsed header.

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


def parse(data: bytes) -> dict[str, Any]:
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
        intact = seal_of(about) == seal
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


def seal_of(about: str) -> str:
    return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()


def checksum(name: str, tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


#: Dtypes by their names in safetensors.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}


class LayerReader:
    """Open file of a variant, whose layers are read one by one, each verified when it is read.

    Args:
        path: Path of the file.
        shape: Shape of the variants of the store.
        chunk: Key of the chunk.

    Attributes:
        facts: Facts of the variant.
        scores: Attention of each token to all earlier parts, (n_tokens,) float32.

    Raises:
        TornFileError: it is not as it was written.
        ForeignFileError: it is of another model or chunk, or of other shapes.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, shape: StoredShape, chunk: str) -> None:
        self._name = path.name
        self._file = path.open("rb", buffering=0)
        try:
            first = self._file.read(8)
            data = first + self._file.read(min(int.from_bytes(first, "little"), MAX_HEADER))
            about = parse(data)
            self.facts = facts_of(about, shape.mark, chunk)
            self._sums: dict[str, str] = about["tensors"]
            self._begin, self._tensors = len(data), self._described(data)
            expected = shape.tensors(self.facts.n_tokens)
            if {name: (shape_, dtype) for name, (shape_, dtype, _, _) in self._tensors.items()} != expected:
                raise ForeignFileError(f"{path.name} holds tensors of other shapes or another dtype than this store's")
            if set(self._sums) != set(expected):
                raise TornFileError(f"{path.name} holds other tensors than it says")
            self._layers = shape.names_by_layer()
            end = max(end for _, _, _, end in self._tensors.values())
            if os.fstat(self._file.fileno()).st_size != self._begin + end:
                raise TornFileError("the file is cut")
            self.scores = self._tensor("scores")
        except BaseException:
            self.close()
            raise

    def read(self, layer: int) -> dict[str, Tensor]:
        """Return the tensors of a layer by their names.

        Raises:
            TornFileError: they are not as they were written.
            OSError: they cannot be read.
        """
        return {name: self._tensor(name) for name in self._layers[layer]}

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    @staticmethod
    def _described(data: bytes) -> dict[str, tuple[tuple[int, ...], torch.dtype, int, int]]:
        """Return shape, dtype and extent of each tensor in a header.

        Raises:
            TornFileError: it describes none.
        """
        found = {}
        try:
            for name, entry in json.loads(data[8:]).items():
                if name != "__metadata__":
                    begin, end = map(int, entry["data_offsets"])
                    dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
                    if begin < 0 or end - begin != torch.Size(shape).numel() * dtype.itemsize:
                        raise TornFileError(f"{name} has an extent of another size than its shape")
                    found[name] = shape, dtype, begin, end
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TornFileError(f"its header cannot be read: {error}") from error
        return found

    def _tensor(self, name: str) -> Tensor:
        shape, dtype, begin, end = self._tensors[name]
        data = bytearray(end - begin)
        self._file.seek(self._begin + begin)
        view = memoryview(data)
        while len(view):
            n = self._file.readinto(view)
            if not n:
                raise TornFileError("the file is cut")
            view = view[n:]
        tensor = torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
        if checksum(name, tensor) != self._sums[name]:
            raise TornFileError(f"{self._name}: {name} is not as it was written")
        return tensor
