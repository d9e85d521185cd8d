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

from millpond.cache.atomic_files import sync_folder
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
    """Fill the buffer (n,) uint8 of a part; yield the bytes that each tensor had in its file.

    Blocks of a GGUF file that are groups of ours are used unchanged, other matrices quantized.

    Raises:
        DataError: a file cannot be read, or is damaged.
        OptionError: a number is not finite, or beyond float16.
    """
    places = {name: coded for codes in part.codes(data) for name, coded in codes.apart()}
    plain = part.parameters(data)
    for name, numbers in source.each(part.sources):
        if name in places:
            target, blocks = places[name], part.blocks.get(name)
            if blocks is not None and blocks.raw is not None:
                packed = blocks.codes(numbers, target.dtype)
            else:
                packed = QuantizedWeight.quantize(numbers, target.bits)
            target.codes.copy_(packed.codes)
            target.scales.copy_(packed.scales)
        else:
            plain[name].data.copy_(numbers)
        yield part.sources[name].nbytes


class MemoryPacker:
    """Packer that fills parts of a model in memory, without a file of packed weights.

    Args:
        sizes: Layouts of all parts.
        report: Called with the progress.
    """

    def __init__(self, sizes: WeightSizes, report: Report | None = None) -> None:
        self._source, self._report = TensorSource(), report or (lambda action, share: None)
        self._total, self._done = sum(source_bytes(part) for part in coded_parts(sizes)), 0

    def __enter__(self) -> MemoryPacker:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._source.__exit__(*exception)

    def __call__(self, part: PartLayout, data: Tensor) -> None:
        """Fill the buffer of a part as `fill` does."""
        assert isinstance(part, CodedLayout), "sizes of codes"
        for nbytes in fill(part, data, self._source):
            self._done += nbytes
            self._report("packing weights", self._done / self._total)


def coded_parts(sizes: WeightSizes) -> list[CodedLayout]:
    """Return the layouts of the ends and of each layer."""
    layouts = [sizes.ends, *sizes.layers]
    assert all(isinstance(part, CodedLayout) for part in layouts), "sizes of codes"
    return layouts  # type: ignore[return-value]


def source_bytes(part: CodedLayout) -> int:
    """Return bytes of files that a part is made from."""
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
    """Return the layouts of a model's packed weights in their file.

    The file is made if there is none of this checkpoint.

    Args:
        folder: Folder of the file.
        name: Name of the model, for the file's name.
        skeleton: Model without its weights.
        weights: "int8" or "int4".
        report: Called with the progress.

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
        checksums = _write(path, weights, mark, parts, report or (lambda action, share: None))
    at = _begin(_header(weights, mark, parts, checksums))
    placed = []
    for part, checksum in zip(parts, checksums, strict=True):
        placed.append(part.within(path, at, checksum))
        at += part.nbytes
    sizes.ends, sizes.layers = placed[0], tuple(placed[1:])
    return sizes


def source_mark(skeleton: Skeleton) -> str:
    """Return a hash that identifies a checkpoint.

    It is of the names, shapes and places of all tensors, with the first and the last page of each.

    Raises:
        DataError: a file cannot be read.
    """
    digest = hashlib.sha256(type(skeleton.model).__name__.encode())
    buffer: Any = aligned_buffer(_SAMPLE).numpy()
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
                    n = file.read_into(aligned_down(offset), memoryview(buffer))
                    digest.update(memoryview(buffer)[:n])
    except OSError as error:
        raise DataError(f"{place.path} cannot be read: {error.strerror or error}") from error
    finally:
        for file in files.values():
            file.close()
    return digest.hexdigest()


# ---------------------------------------------------------------------- header


def _header(weights: str, mark: str, parts: Sequence[CodedLayout], checksums: Sequence[int]) -> bytes:
    """Return the header, equally long for all checksums.

    Places are counted from the first part on.
    """
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
    """Return the offset of the first part."""
    return aligned_up(_FIXED.size + len(header))


def _read_header(path: Path, expected: bytes) -> list[int] | None:
    """Return the checksums of the parts of a complete file with the expected header, or None.

    The checksums in the header are not compared.
    """
    try:
        with path.open("rb") as file:
            magic, length, checksum = _FIXED.unpack(file.read(_FIXED.size))
            text = file.read(min(length, _MAX_HEADER))
        if magic != _MAGIC or len(text) != length or zlib.crc32(text) != checksum:
            return None
        header = json.loads(text)
        checksums = [int(extent[2], 16) for extent in header["extents"]]
        expected_header = json.loads(expected)
        for extent, stored in zip(expected_header["extents"], header["extents"], strict=True):
            extent[2] = stored[2]
        is_complete = path.stat().st_size == _begin(expected) + expected_header["nbytes"]
        return checksums if header == expected_header and is_complete else None
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
    """Write a file that appears under its name when it is complete.

    If the system can, it has no name before, so that nothing of it is left when the process is killed.
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
    with suppress(OSError):
        sync_folder(path.parent)


def _nameless(folder: Path) -> int | None:
    """Return a file without a name, or None if the system has no such thing."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o644)
    except (AttributeError, OSError):
        return None


def _named(handle: int, path: Path) -> str:
    """Return a name next to `path` for a nameless file while it replaces another."""
    name = f".{path.name}-{os.getpid()}-{handle}"
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.link(f"/proc/self/fd/{handle}", name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
    return str(path.parent / name)


def _write_at(handle: int, content: memoryview, at: int) -> None:
    while content:
        n = os.pwrite(handle, content, at)
        content, at = content[n:], at + n
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
