"""Arguments of ops over blocks that another engine lays out: order of the keys inside a block, and sums beside them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.args import AttentionShape, OfQueries
from millpond.kernels.decode_rules import Reduce

#: Tokens of a run, see `Neighbours`.
RUN = 16


class Neighbours(IntEnum):
    """Numbers that lie side by side, which kernels read together; see csrc/common/args.hpp."""

    ANY = 0  #: nothing is known
    TOKENS = 1  #: one channel of runs of 16 tokens
    PAIRS = 2  #: pairs of channels of runs of 16 tokens


@dataclass(frozen=True, slots=True, eq=False)
class KeyOrder:
    """Places of the keys inside one head's part of a block.

    Number c of token t lies at row_at[t] + column_at[c].

    Attributes:
        row_at: (block,) int32.
        column_at: (D,) int32.
        neighbours: What lies side by side.
    """

    row_at: Tensor
    column_at: Tensor
    neighbours: Neighbours = Neighbours.ANY

    @classmethod
    def of(cls, at: Tensor) -> KeyOrder:
        """Return the order of places (block, D).

        Raises:
            OptionError: the places are no sums of one number per token and one per channel.
        """
        row_at, column_at = at[:, 0].int(), (at[0] - at[0, 0]).int()
        if not torch.equal((row_at[:, None] + column_at).long(), at.long()):
            raise OptionError("the places of keys in a block are no sums of one number per token and one per channel")
        neighbours = Neighbours.ANY
        if len(row_at) % RUN == 0:
            steps = row_at.view(-1, RUN).diff()
            pairs = len(column_at) % 2 == 0 and bool((column_at[1::2] - column_at[::2] == 1).all())
            if bool((steps == 1).all()):
                neighbours = Neighbours.TOKENS
            elif pairs and bool((steps == 2).all()):
                neighbours = Neighbours.PAIRS
        return cls(row_at.contiguous(), column_at.contiguous(), neighbours)

    @property
    def at(self) -> Tensor:
        """(block, D) int64: all places."""
        return self.row_at.long()[:, None] + self.column_at.long()


@dataclass(frozen=True, slots=True)
class BlockSumsArgs(OfQueries):
    """One query of each of S sequences, and the entries in blocks that it sees.

    No block belongs to two of the sequences.

    Attributes:
        q: (S, Hq, D), query heads grouped by KV head as for `DecodeArgs`.
        keys: (blocks, Hkv, n): of each head of each block the numbers of which `order` says what they are; the last
            stride is 1.
        order: Order of the keys.
        table: (S, M) int32 block ids, in the order of the entries.
        lens: (S,) int32 entries of each sequence, the query's own among them as the newest; 0: no part.
        sums: (blocks, Hkv, block) float32, contiguous; written.
        shape: Settings of the attention; without a window.
        reduce: Reduction of the query heads of a group.
        decay: Factor on the sums so far, above 0 to 1.

    Raises:
        OptionError: shapes or dtypes that do not belong together, or a window.
    """

    q: Tensor
    keys: Tensor
    order: KeyOrder
    table: Tensor
    lens: Tensor
    sums: Tensor
    shape: AttentionShape
    reduce: Reduce = Reduce.MEAN
    decay: float = 1.0

    def __post_init__(self) -> None:
        blocks, n_kv_heads, _ = self.keys.shape
        wanted = (blocks, n_kv_heads, len(self.order.row_at))
        if self.sums.shape != wanted or self.sums.dtype != torch.float32 or not self.sums.is_contiguous():
            raise OptionError(
                f"sums are contiguous float32 of shape {wanted}, not {self.sums.dtype} of {tuple(self.sums.shape)}"
            )
        if self.q.ndim != 3 or self.q.shape[1] % n_kv_heads or self.q.shape[2] != len(self.order.column_at):
            raise OptionError(
                f"queries {tuple(self.q.shape)} are (sequences, a multiple of {n_kv_heads} heads, "
                f"{len(self.order.column_at)})"
            )
        if self.lens.shape != self.q.shape[:1] or self.table.shape[:1] != self.q.shape[:1] or self.table.ndim != 2:
            raise OptionError(
                f"{len(self.q)} queries need as many rows of blocks and as many lengths, not "
                f"{tuple(self.table.shape)} and {tuple(self.lens.shape)}"
            )
        if self.shape.window:
            raise OptionError(f"window={self.shape.window}: blocks with sums are of attention to everything; give 0")
        if self.keys.stride(2) != 1:
            raise OptionError("the numbers of a head in a block must lie side by side: their stride is 1")
