"""Layout of tensors in a buffer that is filled with direct reads: runs of a file, widened to 4 KiB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from millpond.errors import DataError
from millpond.kernels.quantized_weight import QuantizedWeight
from millpond.models.weights.headers import TensorPlace
from millpond.tiers.buffers import aligned_down, aligned_up

#: Bytes between two tensors that are read rather than skipped.
_GAP = 256 << 10


@dataclass(frozen=True, slots=True)
class Codes:
    """Matrices that read the same rows, in codes, one after another.

    Attributes:
        names: of the parameters. rows: of each of them. whole: all of them.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    whole: QuantizedWeight

    def apart(self) -> Iterator[tuple[str, QuantizedWeight]]:
        """Each of the matrices, with its name."""
        begin = 0
        for name, n in zip(self.names, self.rows, strict=True):
            yield name, self.whole.rows(begin, begin + n)
            begin += n


@dataclass(frozen=True, slots=True)
class FileRun:
    """Bytes of a file that are read at once.

    Attributes:
        offset, nbytes: in the file, multiples of 4 KiB. needed: bytes up to the last one of a tensor. place: in the
            buffer. checksum: CRC-32 of the `needed` bytes; None where it is not known.
    """

    path: Path
    offset: int
    nbytes: int
    needed: int
    place: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where some tensors lie in a buffer.

    Attributes:
        runs: what is read. places: of each tensor, by the name of a parameter. nbytes: of the buffer.
    """

    runs: tuple[FileRun, ...]
    places: Mapping[str, tuple[TensorPlace, int]]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, TensorPlace], gap: int = _GAP) -> Layout:
        """
        Args:
            gap: bytes between two tensors that are read rather than skipped.

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
        """None: all matrices are as they were saved."""
        return ()

    def parameters(self, data: Tensor) -> dict[str, nn.Parameter]:
        """The tensors as views of a buffer (n,) uint8, by name."""
        return {
            name: nn.Parameter(
                data[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape), requires_grad=False
            )
            for name, (tensor, place) in self.places.items()
        }
