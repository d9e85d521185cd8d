"""Blocks of entries outside of the page pool: in host memory or in files, as they are or in codes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from millpond.codec.spec import Codec
from millpond.errors import DataError
from millpond.kernels.packed import codes
from millpond.kernels.packed.layout import PackedLayout
from millpond.policy.needs import Offload

#: Where blocks lie.
Place = Literal["host", "disk"]


def place_of(offload: Offload, codec: Codec | None, pool: torch.device) -> Place | None:
    """Return where blocks go whose pool is on a device; None: they stay in the pool."""
    if offload == "auto":
        return "host" if codec is not None or pool.type != "cpu" else None
    return None if offload == "none" else offload


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Form in which blocks of one layer are stored.

    Attributes:
        place: Where they lie.
        size: Entries of a block.
        codec: Number format, of which a page is a block; None: as the model made them.
    """

    place: Place
    size: int
    codec: Codec | None = None

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Return what is stored of blocks, each tensor (n, ...).

        Args:
            keys: (H, n, size, key_dim).
            values: (H, n, size, value_dim).

        Raises:
            NumericsError: NaN, infinity, or a number that no scale can hold.
        """
        pair = [part.transpose(0, 1).contiguous() for part in (keys, values)]
        if self.codec is None:
            return tuple(pair)
        layout = self._layout(keys.shape[-1], values.shape[-1])
        pages = [
            codes.to_bytes(codes.encode(part.flatten(0, 1), side), side, is_key)
            for part, (side, _, _, is_key) in zip(pair, codes.sides(layout), strict=True)
        ]
        return (torch.cat(pages, 1).view(keys.shape[1], len(keys), -1),)

    def decode(self, stored: tuple[Tensor, ...], dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the keys and values that `encode` stored; `dims`: of a key and of a value."""
        if self.codec is None:
            keys, values = stored
            return keys.transpose(0, 1), values.transpose(0, 1)
        pages, layout = stored[0], self._layout(*dims)
        both = [
            codes.decode(codes.from_bytes(pages.flatten(0, 1), side, at, self.size, dim, is_key), side)
            for side, at, dim, is_key in codes.sides(layout)
        ]
        keys, values = (part.view(*pages.shape[:2], *part.shape[1:]).transpose(0, 1) for part in both)
        return keys, values

    def _layout(self, key_dim: int, value_dim: int) -> PackedLayout:
        assert self.codec is not None, "numbers as they are have no layout"
        return self.codec.layout(key_dim, value_dim, self.size)

    def nbytes(self, n_heads: int, dims: tuple[int, int], dtype: torch.dtype) -> int:
        """Return the bytes of a block of all KV heads, made of numbers of a dtype."""
        if self.codec is None:
            return n_heads * self.size * sum(dims) * dtype.itemsize
        return n_heads * self._layout(*dims).page_bytes

    def put(self, stored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return tensors in the memory where blocks lie.

        Raises:
            DataError: the disk is full, or cannot be written.
        """
        if self.place == "disk":
            return tuple(map(_in_file, stored))
        return tuple(part.cpu().pin_memory() if part.is_cuda else part.clone() for part in stored)


class FarBlocks:
    """Blocks of one sequence of one layer, in their order.

    It is replaced and never written to, so copies share it.

    They lie in runs, of which a later one is always the shorter one, so that there are few: a new block joins the run
    before it as the digits of a number do.

    Args:
        format: Form in which they are stored.
        dims: Numbers of a key and of a value.
        runs: Runs of blocks, each tensor (n, ...).

    Attributes:
        format: See above.
        dims: See above.
        n: Number of blocks.
    """

    def __init__(self, format: BlockFormat, dims: tuple[int, int], runs: tuple[tuple[Tensor, ...], ...] = ()) -> None:
        self.format, self.dims, self._runs = format, dims, runs
        self.n = sum(len(run[0]) for run in runs)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(part.nbytes for run in self._runs for part in run)

    def with_more(self, keys: Tensor, values: Tensor) -> FarBlocks:
        """Return these blocks and more.

        keys: (H, n, size, key_dim), values: (H, n, size, value_dim).

        Raises:
            DataError, NumericsError: see `BlockFormat`.
        """
        runs, new = list(self._runs), self.format.encode(keys, values)
        while runs and len(runs[-1][0]) <= len(new[0]):
            new = tuple(torch.cat([old.to(part.device), part]) for old, part in zip(runs.pop(), new, strict=True))
        return FarBlocks(self.format, self.dims, (*runs, self.format.put(new)))

    def read(self, ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return keys and values of the blocks `ids` (m,), ascending.

        They are (H, m, size, key_dim) and (H, m, size, value_dim).

        Only these are read.
        """
        wanted, begin = ids.cpu(), 0
        found: list[tuple[Tensor, ...]] = []
        for run in self._runs:
            end = begin + len(run[0])
            own = wanted[(wanted >= begin) & (wanted < end)] - begin
            if len(own):
                found.append(tuple(part.index_select(0, own).to(device) for part in run))
            begin = end
        return self.format.decode(tuple(map(torch.cat, zip(*found, strict=True))), self.dims)

    def whole(self) -> tuple[Tensor, ...]:
        """Return what is stored of all blocks, in host memory."""
        return tuple(map(torch.cat, zip(*self._runs, strict=True)))

    def adopted(self, stored: tuple[Tensor, ...], size: int) -> FarBlocks:
        """Return blocks of this form that `whole` returned elsewhere.

        Args:
            stored: The tensors.
            size: Entries of a block there.

        Raises:
            DataError: they are of another form; nothing was stored.
        """
        heads = stored[0].shape[1]
        zeros = (torch.zeros(heads, 1, self.format.size, dim, dtype=stored[0].dtype) for dim in self.dims)
        fits = size == self.format.size and (self.format.codec is not None or stored[0].is_floating_point())
        own = self.format.encode(*zeros) if fits else ()
        form = [(len(stored[0]), *part.shape[1:], part.dtype) for part in own]
        if not fits or [(*part.shape, part.dtype) for part in stored] != form:
            raise DataError("blocks of entries have another size or number format than here; save the text again")
        return FarBlocks(self.format, self.dims, (self.format.put(stored),))


def fetched(
    at: Tensor, sinks: int, far: FarBlocks, resident: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return keys and values at positions (n,), wherever they lie.

    They are (H, n, key_dim) and (H, n, value_dim).

    Args:
        at: Positions.
        sinks: Entries before the first block.
        far: Blocks outside of the pool, of the positions from `sinks` on.
        resident: Reads entries by their index among those in the pool.
    """
    size, end = far.format.size, sinks + far.n * far.format.size
    outside = (at >= sinks) & (at < end)
    keys, values = resident(torch.where(at < sinks, at, at - far.n * size)[~outside])
    if not bool(outside.any()):
        return keys, values
    places = at[outside] - sinks
    ids, which = torch.unique(places // size, return_inverse=True)
    both = []
    for near, blocks in zip((keys, values), far.read(ids, at.device), strict=True):
        joined = near.new_empty(len(near), len(at), near.shape[-1])
        joined[:, ~outside] = near
        joined[:, outside] = blocks[:, which, places % size].to(near.dtype)
        both.append(joined)
    return both[0], both[1]


def _in_file(part: Tensor) -> Tensor:
    """Return a tensor whose numbers lie in a file.

    The file has no name, and is gone with the tensor.

    Raises:
        DataError: the file cannot be written.
    """
    if not part.numel():
        return part.cpu()
    whole = part.cpu().contiguous()
    path = None
    try:
        with tempfile.NamedTemporaryFile(prefix="millpond-blocks-", delete=False) as file:
            path = file.name
            file.write(memoryview(whole.view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
        return torch.from_file(path, shared=True, size=whole.numel(), dtype=whole.dtype).view(whole.shape)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"blocks of a cache cannot be written to {tempfile.gettempdir()} ({error}); set TMPDIR to a folder with "
            'room, or give offload="host"'
        ) from error
    finally:
        if path is not None:
            os.unlink(path)
