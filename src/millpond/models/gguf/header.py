"""Header of a GGUF file, with every count and size checked against the file before anything is allocated.

The format is llama.cpp's: magic, version, counts, then metadata, then a name, shape, type and offset of each tensor.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from millpond.errors import DataError
from millpond.optional import require

MAGIC, VERSIONS = b"GGUF", (2, 3)
#: Most dimensions of a tensor, and most bytes of a name or key.
MAX_DIMS, LONGEST_NAME = 4, 65_535
_STRING, _ARRAY = 8, 9
#: How `struct` calls the numbers, by their type in the file.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GGUFTensor(NamedTuple):
    """Tensor as the header describes it; `type` is the name of a ggml type, such as "Q4_K".

    Its first byte in the file is `begin`.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    begin: int

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GGUFHeader:
    """Description that a GGUF file gives of itself.

    Attributes:
        metadata: Numbers and strings; of an array its length, or its values if `read_header` got its key.
    """

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]

    @property
    def architecture(self) -> str:
        """Architecture by llama.cpp's name; "" if the file names none."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def size(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def dtype(self) -> str:
        """Default dtype of the loaded matrices: their own float type, bf16 for quantized ones."""
        types = {tensor.type for tensor in self.tensors if len(tensor.shape) > 1}
        return {frozenset({"F32"}): "f32", frozenset({"F16"}): "f16"}.get(frozenset(types), "bf16")

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file contains a vocabulary."""
        return bool(self.metadata.get("tokenizer.ggml.tokens"))


def read_header(path: Path, arrays: Collection[str] = ()) -> GGUFHeader:
    """Return the header of a GGUF file.

    Args:
        path: GGUF file.
        arrays: Keys of arrays that are read in full, as lists.

    Raises:
        DataError: it is no GGUF file, one of another version, cut off, or one whose numbers contradict each other.
        OptionError: the package gguf, which knows the sizes of types, is not installed.
    """
    sizes = _type_sizes()
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header(sizes, arrays)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise DataError(f"{path} cannot be read as a GGUF file: {error}") from error


def read_floats(path: Path, tensor: GGUFTensor) -> list[float]:
    """Return the numbers of a tensor of type F32, in the order of the file.

    Raises:
        DataError: it has another type.
    """
    if tensor.type != "F32":
        raise DataError(f"{path}: tensor {tensor.name!r} is of the type {tensor.type}; F32 is expected")
    with path.open("rb") as file:
        file.seek(tensor.begin)
        return list(struct.unpack(f"<{tensor.size}f", file.read(4 * tensor.size)))


def _type_sizes() -> dict[int, tuple[str, int, int]]:
    """Return name, numbers of a block and bytes of a block of each ggml type."""
    gguf = require("gguf", "gguf", "a GGUF file")
    return {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}


class _Reader:
    """Reader that moves forward through a mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self, sizes: dict[int, tuple[str, int, int]], arrays: Collection[str]) -> GGUFHeader:
        if self._take(4) != MAGIC:
            self._refuse("it does not begin with 'GGUF'")
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in VERSIONS
            versions = " and ".join(map(str, VERSIONS))
            self._refuse("it is big-endian" if swapped else f"its version is {version}; versions {versions} are read")
        n_tensors, n_keys = self._count(24, "tensors"), self._count(13, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._name("a key")
            metadata[key] = self._value(self._number("I"), key in arrays)
        described = [self._tensor(sizes) for _ in range(n_tensors)]
        if len({tensor.name for tensor, _, _ in described}) < n_tensors:
            self._refuse("two tensors have one name")
        aligned = metadata.get("general.alignment", 32)
        if not isinstance(aligned, int) or not 0 < aligned <= 2**20 or aligned & (aligned - 1):
            self._refuse(f"general.alignment is {aligned!r}, and no power of two")
        begin = (self._at + aligned - 1) // aligned * aligned
        for tensor, offset, n_bytes in described:
            if begin + offset + n_bytes > len(self._data):
                self._refuse(f"tensor {tensor.name!r} lies beyond its end: the file is cut off")
        end = 0
        for tensor, offset, n_bytes in sorted(described, key=lambda entry: entry[1:]):
            if offset < end:
                self._refuse(f"tensor {tensor.name!r} lies in the bytes of another")
            end = offset + n_bytes
        return GGUFHeader(metadata, tuple(tensor._replace(begin=begin + tensor.begin) for tensor, _, _ in described))

    def _tensor(self, sizes: dict[int, tuple[str, int, int]]) -> tuple[GGUFTensor, int, int]:
        """Return a tensor, its offset, and its bytes."""
        name, n_dims = self._name("a tensor's name"), self._number("I")
        if not 0 < n_dims <= MAX_DIMS:
            self._refuse(f"tensor {name!r} has {n_dims} dimensions; at most {MAX_DIMS} are possible")
        shape = tuple(self._number("Q") for _ in range(n_dims))
        kind, offset = self._number("I"), self._number("Q")
        if kind not in sizes:
            self._refuse(f"tensor {name!r} has the type {kind}, which the installed package gguf does not know")
        label, block, n_bytes = sizes[kind]
        if shape[0] % block:
            self._refuse(f"tensor {name!r} has rows of {shape[0]} numbers, and {label} blocks of {block}")
        return GGUFTensor(name, shape, label, offset), offset, math.prod(shape) // block * n_bytes

    def _value(self, kind: int, whole: bool) -> Any:
        if kind == _STRING:
            return self._take(self._number("Q")).decode("utf-8", "replace")
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            self._refuse(f"a value has the type {kind}, which does not exist")
        inner = self._number("I")
        if inner == _STRING:
            length = self._count(8, "strings")
            taken = (self._take(self._number("Q")) for _ in range(length))
            if whole:
                return [string.decode("utf-8", "replace") for string in taken]
            for _ in taken:  # each has a length of its own to be checked
                pass
        elif inner in _NUMBERS:
            size = struct.calcsize(_NUMBERS[inner])
            length = self._count(size, "numbers")
            numbers = self._take(length * size)
            if whole:
                return list(struct.unpack(f"<{length}{_NUMBERS[inner]}", numbers))
        else:
            self._refuse(f"an array has values of the type {inner}; numbers and strings are possible")
        return length

    def _count(self, min_bytes: int, noun: str) -> int:
        """Return a number of things that take at least `min_bytes` bytes each."""
        count: int = self._number("Q")
        if count > (len(self._data) - self._at) // min_bytes:
            self._refuse(f"it is too short for {count:,} {noun}: the file is cut off")
        return count

    def _name(self, noun: str) -> str:
        length = self._number("Q")
        if not 0 < length <= LONGEST_NAME:
            self._refuse(f"{noun} has {length:,} bytes; 1 to {LONGEST_NAME:,} are possible")
        return self._take(length).decode("utf-8", "replace")

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(kind)))[0]

    def _take(self, n: int) -> bytes:
        if n > len(self._data) - self._at:
            self._refuse("it ends inside its header: the file is cut off")
        self._at += n
        return self._data[self._at - n : self._at]

    def _refuse(self, why: str) -> None:
        raise DataError(f"{self._path} is not a GGUF file that can be read: {why}")
