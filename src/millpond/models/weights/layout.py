"""Places of tensors: headers of safetensors files, and runs of a file widened to 4 KiB for direct reads."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from millpond.errors import DataError, OptionError
from millpond.kernels.quantized_weight import QuantizedWeight
from millpond.tiers.buffers import aligned_buffer, aligned_down, aligned_up
from millpond.tiers.files import DirectFile

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: A header that claims to be longer is damaged.
_MAX_HEADER = 100 << 20


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of a tensor in a file.

    Attributes:
        path: File of the tensor.
        offset: First byte in the file.
        nbytes: Bytes of the tensor.
        dtype: Dtype of its numbers.
        shape: Shape of the tensor.
    """

    name: str
    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def has_safetensors(folder: Path) -> bool:
    """Whether a folder holds weights in safetensors files."""
    return (folder / _INDEX).is_file() or (folder / _SINGLE).is_file()


def tensors_of_folder(folder: Path) -> dict[str, TensorPlace]:
    """Return the places of all tensors of a folder, by name.

    They are those of `model.safetensors`, or of the shards of `model.safetensors.index.json`.

    Raises:
        OptionError: the folder has neither.
        DataError: a header is damaged, a file has another size than its header
            says, or a tensor or shard that the index names is missing.
    """
    if (folder / _INDEX).is_file():
        return _of_shards(folder, _weight_map(folder / _INDEX))
    if (folder / _SINGLE).is_file():
        return tensors_of_file(folder / _SINGLE)
    raise OptionError(
        f"{folder} holds neither {_SINGLE} nor {_INDEX}, and weights are read layer by layer from safetensors files "
        "only; load the model without memory= and save it with save_pretrained"
    )


def tensors_of_file(path: Path) -> dict[str, TensorPlace]:
    """Return the places of all tensors of a safetensors file, by name.

    Raises:
        DataError: the header is damaged, or the file has another size than it says.
    """
    file = DirectFile(path)
    try:
        size, first = file.size, _beginning(file, 8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise DataError(f"{path} has {size:,} bytes and claims a header of {length:,}; it is damaged or cut off")
        header = json.loads(_beginning(file, 8 + length)[8:])
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the header of {path} is no JSON ({error}); the file is damaged") from error
    finally:
        file.close()
    if not isinstance(header, dict):
        raise DataError(f"the header of {path} is no table of tensors; the file is damaged")
    begin = 8 + length
    places = {name: _place(path, name, entry, begin) for name, entry in header.items() if name != "__metadata__"}
    end = max((place.offset + place.nbytes for place in places.values()), default=begin)
    if end != size:
        raise DataError(f"{path} has {size:,} bytes, and its header describes {end:,}; it is damaged or cut off")
    return places


def _beginning(file: DirectFile, nbytes: int) -> bytes:
    """Return the first bytes of a file, read past the page cache."""
    numbers: Any = aligned_buffer(nbytes).numpy()
    buffer = memoryview(numbers)
    return bytes(buffer[: min(nbytes, file.read_into(0, buffer))])


def _place(path: Path, name: str, entry: Any, begin: int) -> TensorPlace:
    try:
        first, last = (int(n) for n in entry["data_offsets"])
        dtype, shape = _DTYPES.get(entry["dtype"]), tuple(int(n) for n in entry["shape"])
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(f"the header of {path} does not describe {name!r}; the file is damaged") from error
    if dtype is None:
        raise DataError(f"{name!r} in {path} has the dtype {entry['dtype']!r}; known: {', '.join(_DTYPES)}")
    if first < 0 or last - first != math.prod(shape) * dtype.itemsize:
        raise DataError(f"{name!r} in {path} has shape {list(shape)} and {last - first:,} bytes; the file is damaged")
    return TensorPlace(name, path, begin + first, last - first, dtype, shape)


def _weight_map(path: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no index of shards ({type(error).__name__}: {error})") from error


def check_shards(index: Path, files: Iterable[Any]) -> None:
    """Check that all shards of an index are in its folder.

    Raises:
        DataError: an index names a shard that lies elsewhere.
    """
    for file in dict.fromkeys(map(str, files)):
        if Path(file).name != file:
            raise DataError(f"{index} names the shard {file!r}, which is no file of the folder")


def _of_shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, TensorPlace]:
    shards: dict[str, dict[str, TensorPlace]] = {}
    check_shards(folder / _INDEX, weight_map.values())
    for file in dict.fromkeys(weight_map.values()):
        shards[file] = tensors_of_file(folder / file)
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise DataError(f"{folder / file} lacks the tensor {name!r}, which {_INDEX} places there")
    return {name: shards[file][name] for name, file in weight_map.items()}


#: Bytes between two tensors that are read rather than skipped.
_GAP = 256 << 10


@dataclass(frozen=True, slots=True)
class Codes:
    """Matrices in codes that read the same rows, one after another.

    Attributes:
        names: Names of the parameters.
        rows: Rows of each of them.
        whole: All of them as one matrix.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    whole: QuantizedWeight

    def apart(self) -> Iterator[tuple[str, QuantizedWeight]]:
        """Return each of the matrices, with its name."""
        begin = 0
        for name, n in zip(self.names, self.rows, strict=True):
            yield name, self.whole.rows(begin, begin + n)
            begin += n


@dataclass(frozen=True, slots=True)
class FileRun:
    """Bytes of a file that are read at once.

    Attributes:
        offset: First byte in the file, a multiple of 4 KiB.
        nbytes: Bytes to read, a multiple of 4 KiB.
        needed: Bytes up to the last one of a tensor.
        place: First byte in the buffer.
        checksum: CRC-32 of the `needed` bytes; None if it is not known.
    """

    path: Path
    offset: int
    nbytes: int
    needed: int
    place: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of some tensors in a buffer.

    Attributes:
        runs: Runs of files that are read.
        places: Place of each tensor, by the name of a parameter.
        nbytes: Bytes of the buffer.
    """

    runs: tuple[FileRun, ...]
    places: Mapping[str, tuple[TensorPlace, int]]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, TensorPlace], gap: int = _GAP) -> Layout:
        """Return the layout of tensors in a buffer.

        Args:
            tensors: Tensors by the name of their parameter.
            gap: Bytes between two tensors that are read rather than skipped.

        Raises:
            DataError: a tensor begins inside of a number, so that its memory cannot be used as it was read.
        """
        runs: list[FileRun] = []
        places: dict[str, tuple[TensorPlace, int]] = {}
        for parameter, tensor in sorted(tensors.items(), key=lambda item: (item[1].path, item[1].offset)):
            if tensor.offset % tensor.dtype.itemsize:
                raise DataError(
                    f"{tensor.name!r} in {tensor.path} begins at {tensor.offset:,}, no multiple of its numbers' "
                    f"{tensor.dtype.itemsize} bytes; save the model again with save_pretrained"
                )
            end = tensor.offset + tensor.nbytes
            last = runs[-1] if runs else None
            if last is not None and last.path == tensor.path and tensor.offset <= last.offset + last.nbytes + gap:
                end = max(end, last.offset + last.needed)
                runs[-1] = FileRun(last.path, last.offset, aligned_up(end) - last.offset, end - last.offset, last.place)
            else:
                offset, place = aligned_down(tensor.offset), 0 if last is None else last.place + last.nbytes
                runs.append(FileRun(tensor.path, offset, aligned_up(end) - offset, end - offset, place))
            places[parameter] = tensor, runs[-1].place + tensor.offset - runs[-1].offset
        return cls(tuple(runs), places, runs[-1].place + runs[-1].nbytes if runs else 0)

    def codes(self, data: Tensor) -> Sequence[Codes]:
        """Return no matrices in codes: all are as they were saved."""
        return ()

    def parameters(self, data: Tensor) -> dict[str, nn.Parameter]:
        """Return the tensors as views of a buffer (n,) uint8, by name."""
        return {
            name: nn.Parameter(
                data[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape), requires_grad=False
            )
            for name, (tensor, place) in self.places.items()
        }
