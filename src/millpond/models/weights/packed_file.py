"""Packed weight file: a model's matrices in 4 or 8 bits, made once and read as the plain weights are."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from millpond.errors import DataError, OptionError
from millpond.kernels.checksum import crc32
from millpond.kernels.quantized_weight import QuantizedWeight
from millpond.models.cache_folder import check_folder
from millpond.models.weights.packed_layout import CodedLayout
from millpond.models.weights.sizes import PartLayout, WeightSizes
from millpond.models.weights.skeleton import Skeleton
from millpond.models.weights.tensor_source import TensorSource
from millpond.tiers.buffers import aligned_buffer, aligned_down, aligned_up
from millpond.tiers.files import DirectFile
from millpond.tiers.free_memory import give_back

#: Shows that a share (0 to 1) of the work is done.
Report = Callable[[str, float], None]


def fill(part: CodedLayout, data: Tensor, source: TensorSource) -> Iterator[int]:
    """Fill the buffer (n,) uint8 of a part; yields the bytes that each tensor had in its file.

    Blocks of a GGUF file that are groups of ours are taken over, other matrices quantized.

    Raises:
        DataError: a file cannot be read, or is damaged. OptionError: a number is not finite, or beyond float16.
    """
    places = {name: coded for codes in part.codes(data) for name, coded in codes.apart()}
    plain = part.parameters(data)
    for name, numbers in source.each(part.sources):
        if name in places:
            room, blocks = places[name], part.blocks.get(name)
            if blocks is not None and blocks.raw is not None:
                packed = blocks.codes(numbers, room.dtype)
            else:
                packed = QuantizedWeight.quantize(numbers, room.bits)
            room.codes.copy_(packed.codes)
            room.scales.copy_(packed.scales)
        else:
            plain[name].data.copy_(numbers)
        yield part.sources[name].nbytes


class MemoryPacker:
    """Fills parts of a model in memory, without a file of packed weights.

    Args:
        sizes: Of all parts.
        report: Shown how far it is.
    """

    def __init__(self, sizes: WeightSizes, report: Report | None = None) -> None:
        self._source, self._report = TensorSource(), report or (lambda what, share: None)
        self._total, self._done = sum(source_bytes(part) for part in coded_parts(sizes)), 0

    def __enter__(self) -> MemoryPacker:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._source.__exit__(*exception)

    def __call__(self, part: PartLayout, data: Tensor) -> None:
        """Fill the buffer of a part: see `fill`."""
        assert isinstance(part, CodedLayout), "sizes of codes"
        for nbytes in fill(part, data, self._source):
            self._done += nbytes
            self._report("packing weights", self._done / self._total)


def coded_parts(sizes: WeightSizes) -> list[CodedLayout]:
    """Return the ends and each layer."""
    layouts = [sizes.ends, *sizes.layers]
    assert all(isinstance(part, CodedLayout) for part in layouts), "sizes of codes"
    return layouts  # type: ignore[return-value]


def source_bytes(part: CodedLayout) -> int:
    """Return bytes of files that a part is made of."""
    return sum(place.nbytes for place in part.sources.values())


#: Changes when the meaning of a byte does.
FORMAT = 2
_MAGIC, _FIXED = b"MPWEIGHT", struct.Struct("<8sQI")
_MAX_HEADER = 16 << 20
#: Bytes of a tensor's first and last page by which a checkpoint is known.
_SAMPLE = 4096


def packed_sizes(
    folder: Path, name: str, skeleton: Skeleton, weights: str, report: Report | None = None
) -> WeightSizes:
    """Return the layouts of the packed weights of a model in their file, which is made if there is none of this
    checkpoint.

    Args:
        folder: Where the file is, or comes to be.
        name: Of the model, for the file's name.
        weights: "int8" or "int4".
        report: Shown how far it is.

    Raises:
        OptionError: the folder is not there, cannot be written or has too little room, or a number is not finite or
            beyond float16. DataError: a file of the model cannot be read. UnsupportedModelError: a matrix that cannot
            be quantized.
    """
    sizes = WeightSizes(skeleton, weights)
    mark = source_mark(skeleton)
    path = folder / f"{name}-{mark[:12]}.{weights}.weights"
    parts = coded_parts(sizes)
    checksums = _read_header(path, _header(weights, mark, parts, [0] * len(parts)))
    if checksums is None:
        checksums = _write(path, weights, mark, parts, report or (lambda what, share: None))
    at = _begin(_header(weights, mark, parts, checksums))
    placed = []
    for part, checksum in zip(parts, checksums, strict=True):
        placed.append(part.within(path, at, checksum))
        at += part.nbytes
    sizes.ends, sizes.layers = placed[0], tuple(placed[1:])
    return sizes


def source_mark(skeleton: Skeleton) -> str:
    """Return a hash by which a checkpoint is known: names, shapes and places of all tensors, with the first and the
    last page of each.

    Raises:
        DataError: a file cannot be read.
    """
    digest = hashlib.sha256(type(skeleton.model).__name__.encode())
    room: Any = aligned_buffer(_SAMPLE).numpy()
    files: dict[Path, DirectFile] = {}
    try:
        for part in (skeleton.ends, *skeleton.by_layer):
            for name, place in part.items():
                if place.path not in files:
                    files[place.path] = DirectFile(place.path)
                file = files[place.path]
                marks = [name, str(place.dtype), list(place.shape), place.path.name, place.offset, file.size]
                digest.update(json.dumps(marks).encode())
                for offset in (place.offset, place.offset + max(place.nbytes - 1, 0)):
                    n = file.read_into(aligned_down(offset), memoryview(room))
                    digest.update(memoryview(room)[:n])
    except OSError as error:
        raise DataError(f"{place.path} cannot be read: {error.strerror or error}") from error
    finally:
        for file in files.values():
            file.close()
    return digest.hexdigest()


# ---------------------------------------------------------------------- header


def _header(weights: str, mark: str, parts: Sequence[CodedLayout], checksums: Sequence[int]) -> bytes:
    """Return the header, as long for all checksums; places are counted from the first part on."""
    extents, at = [], 0
    for part, checksum in zip(parts, checksums, strict=True):
        extents.append([at, part.needed, f"{checksum:08x}"])
        at += part.nbytes
    header = {
        "format": FORMAT,
        "weights": weights,
        "source": mark,
        "nbytes": at,
        "extents": extents,
        "matrices": [part.described() for part in parts],
    }
    return json.dumps(header).encode()


def _begin(header: bytes) -> int:
    """Return where the first part lies."""
    return aligned_up(_FIXED.size + len(header))


def _read_header(path: Path, expected: bytes) -> list[int] | None:
    """Checksums of the parts of a whole file with the expected header, but for these; None where there is none."""
    try:
        with path.open("rb") as file:
            magic, length, checksum = _FIXED.unpack(file.read(_FIXED.size))
            text = file.read(min(length, _MAX_HEADER))
        if magic != _MAGIC or len(text) != length or zlib.crc32(text) != checksum:
            return None
        header = json.loads(text)
        checksums = [int(extent[2], 16) for extent in header["extents"]]
        wanted = json.loads(expected)
        for extent, own in zip(wanted["extents"], header["extents"], strict=True):
            extent[2] = own[2]
        whole = path.stat().st_size == _begin(expected) + wanted["nbytes"]
        return checksums if header == wanted and whole else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, struct.error):
        return None


# ---------------------------------------------------------------------- packing


def _write(path: Path, weights: str, mark: str, parts: Sequence[CodedLayout], say: Report) -> list[int]:
    """Write the file, and return the checksums of its parts."""
    blank = _header(weights, mark, parts, [0] * len(parts))
    nbytes = _begin(blank) + sum(part.nbytes for part in parts)
    check_folder(path.parent, nbytes)
    total, done = sum(source_bytes(part) for part in parts), 0
    checksums, at = [], _begin(blank)
    with _appearing(path) as handle, TensorSource() as source:
        for part in parts:
            data = aligned_buffer(part.nbytes)
            for read in fill(part, data, source):
                done += read
                say("packing weights", done / total)
            content: Any = data.numpy()
            checksums.append(crc32(data[: part.needed]))
            _write_at(handle, memoryview(content)[: part.nbytes], at)
            at += part.nbytes
            del content, data
            give_back()  # temporaries of one part are not those of the next
        header = _header(weights, mark, parts, checksums)
        _write_at(handle, memoryview(_FIXED.pack(_MAGIC, len(header), zlib.crc32(header)) + header), 0)
    return checksums


@contextmanager
def _appearing(path: Path) -> Iterator[int]:
    """A file that is written, and appears under its name when it is complete.

    Where the system can it has no name before, so that nothing is left of it when the process is killed.
    """
    hidden, temporary = _nameless(path.parent), ""
    try:
        if hidden is None:
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        else:
            handle = hidden
        try:
            yield handle
            os.fsync(handle)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            if not temporary:
                temporary = _named(handle, path)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            raise OptionError(f"{path} cannot be written: {error.strerror or error}; name another folder") from error
        raise
    _sync_folder(path.parent)


def _nameless(folder: Path) -> int | None:
    """Return a file without a name; None where there is no such thing."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o644)
    except (AttributeError, OSError):
        return None


def _named(handle: int, path: Path) -> str:
    """Return a name next to `path` for a file without one, for the moment in which it replaces another."""
    name = f".{path.name}-{os.getpid()}-{handle}"
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.link(f"/proc/self/fd/{handle}", name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
    return str(path.parent / name)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_at(handle: int, content: memoryview, at: int) -> None:
    while content:
        n = os.pwrite(handle, content, at)
        content, at = content[n:], at + n
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
