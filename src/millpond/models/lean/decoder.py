"""Decoder: forward of a whole model over packed rows, with embeddings and head in memory or only in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from millpond.kernels.args import StepRegions
from millpond.kernels.decoder_ops import DecoderOps, Norm, choose, in_one_call
from millpond.kernels.linear import FEW_ROWS, linear
from millpond.kernels.native import Layers
from millpond.kernels.quantized_weight import QuantizedWeight, Weight
from millpond.models.lean.block import Attend, Block, GiveHidden, TurningAttend

#: A linear layer: rows (N, k), weight (n, k) and bias (n,) or None to (N, n).
Multiply = Callable[[Tensor, Weight, Tensor | None], Tensor]


class GivenRows(NamedTuple):
    """Rows of a pass whose embeddings are given, such as those of images.

    Attributes:
        rows: Their places in the pass, (m,) int64.
        vectors: Their embeddings, (m, width of the embeddings).
    """

    rows: Tensor
    vectors: Tensor


class EmbeddingSource(Protocol):
    """Embeddings of which only the rows that are looked up are read.

    Attributes:
        dtype: Dtype of the rows.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def __len__(self) -> int: ...

    def take(self, ids: Tensor) -> Tensor:
        """Return rows `ids` (N,) as numbers: (N, width)."""
        ...


class HeadSource(Protocol):
    """Head whose matrix comes in tiles of rows."""

    def product(self, x: Tensor, bias: Tensor | None, multiply: Multiply) -> Tensor:
        """Return (N, vocabulary) of rows x (N, width), each tile multiplied by `multiply`."""
        ...


#: Embeddings or a head that are no parameters of the model: in codes, or read while they are used.
EndMatrix = QuantizedWeight | EmbeddingSource | HeadSource


Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
#: narrow(index) -> rows (n,) int64, ascending, on the host, that go on behind layer `index`; None: all of a pass.
Narrow = Callable[[int], Tensor | None]


class BlockSource(Protocol):
    """Layers in order: a tuple, or layers whose weights are streamed.

    The weights of a block are in memory until the iterator is advanced.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]: ...


class StreamedBlocks(BlockSource, Protocol):
    """Layers whose weights are streamed, with head and embeddings in codes or streamed, too.

    Attributes:
        head: (vocabulary, width) in codes, or its reader; None if it is a weight of the model.
        tokens: (vocabulary, width) in codes, or their reader; None if they are a weight of the model.
        resident: Whether the weights of all layers stay in memory.
    """

    head: QuantizedWeight | HeadSource | None
    tokens: QuantizedWeight | EmbeddingSource | None
    resident: bool


@dataclass(frozen=True)
class Decoder:
    """Model, described by its blocks, embeddings and head.

    Attributes:
        tokens: (vocabulary, width), embeddings, plain, quantized or read row by row.
        blocks: Layers, first to last; only a tuple of them runs in one call.
        head: Weight (vocabulary, width), in memory or read in tiles, and bias.
        rotary: rotary(x, positions (1, N)) -> cos and sin (1, N, dim), as transformers has it.
        positions: (n, width), learned positions, the first `offset` unused.
        project_in: Projection from the width of the embeddings to that of the layers (OPT-350m).
        project_out: Projection from the width of the layers to that of the embeddings (OPT-350m).
        fixed_order: A row has the same bits, however many others a pass has.
    """

    tokens: Weight | EmbeddingSource
    blocks: BlockSource
    norm: Norm | None
    head: tuple[Weight | HeadSource, Tensor | None]
    rotary: Rotary | None = None
    positions: Tensor | None = None
    offset: int = 0
    project_in: Tensor | None = None
    project_out: Tensor | None = None
    fixed_order: bool = False

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend | TurningAttend,
        rows: Tensor,
        narrow: Narrow | None = None,
        given: GivenRows | None = None,
        give_hidden: GiveHidden | None = None,
    ) -> Tensor:
        """Return logits (n, vocabulary) of the rows `rows` (n,).

        The tokens `ids` (N,) are at `positions` (N,) of their texts. The rows ascend, and `narrow` leaves none of them
        out. `given` has the embeddings of some tokens. `give_hidden` is told what the attention of each layer reads.
        """
        x = self.embed(ids, positions, given)
        rotary, dense = self.angles(x, positions), self._ops(x)
        last = len(self.blocks) - 1
        for n, block in enumerate(self.blocks):
            few = rows if n == last and len(rows) < len(x) else None
            x = block.forward(x, rotary, attend, dense, few, give_hidden)
            stay = narrow(block.index) if narrow is not None and n < last else None
            if stay is not None:
                stay = stay.to(x.device)
                x, rows = x[stay], torch.searchsorted(stay, rows)
                rotary = None if rotary is None else (rotary[0][stay], rotary[1][stay])
                dense = self._ops(x)
        return self.logits(x)

    def in_one_call(self, n: int) -> Layers | None:
        """Return all layers for n rows, one of each sequence; None if they cannot run in one call."""
        return self._in_one_call if self.ops(n).few else None

    def ops(self, n: int) -> DecoderOps:
        """Return the kernels that compute n rows."""
        tokens = self.tokens
        if isinstance(tokens, Tensor):
            return self._ops(tokens[:1].expand(n, -1))
        device = tokens.codes.device if isinstance(tokens, QuantizedWeight) else None
        return self._ops(torch.empty((n, 1), dtype=tokens.dtype, device=device))

    def _ops(self, x: Tensor) -> DecoderOps:
        return choose(x, fixed_order=self.fixed_order)

    def _linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if not self.fixed_order or len(x) <= FEW_ROWS:
            return linear(x, weight, bias)
        return torch.cat([linear(part, weight, bias) for part in torch.split(x, FEW_ROWS)])

    @cached_property
    def _in_one_call(self) -> Layers | None:
        blocks = self.blocks
        if not isinstance(blocks, tuple):
            return None
        sizes = {(block.head_dim, *(len(weight) for weight, _ in block.qkv.parts)) for block in blocks}
        if self.rotary is None or len(sizes) > 1 or not all(block.in_order for block in blocks):
            return None
        return in_one_call([(block.qkv, block.rest) for block in blocks], blocks[0].head_dim)

    def step(
        self, ids: Tensor, positions: Tensor, layers: Layers, regions: Sequence[StepRegions]
    ) -> tuple[Tensor, Tensor]:
        """Run `forward` for the newest token of each sequence, with the logits of all.

        Args:
            ids: (N,) token ids.
            positions: (N,) their positions.
            layers: Layers of `in_one_call`.
            regions: Entries that each of them attends to.

        Returns:
            (N, vocabulary) logits and (layers, N, n_heads) log-sum-exp of attention.
        """
        x = self.embed(ids, positions).contiguous()
        rotary = self.angles(x, positions)
        assert rotary is not None, "of layers that turn"
        lse = layers(x, *rotary, regions)
        return self.logits(x), lse

    def embed(self, ids: Tensor, positions: Tensor, given: GivenRows | None = None) -> Tensor:
        """Return (N, width): the input of the first layer, with the embeddings that are `given`."""
        tokens = self.tokens
        x = functional.embedding(ids, tokens) if isinstance(tokens, Tensor) else tokens.take(ids)
        if given is not None:
            x = x.index_copy(0, given.rows, given.vectors.to(x.dtype))
        if self.project_in is not None:
            x = self._linear(x, self.project_in)
        return x if self.positions is None else x + functional.embedding(positions + self.offset, self.positions)

    def angles(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin of the rotary embedding, (N, dim) each."""
        if self.rotary is None:
            return None
        cos, sin = self.rotary(x, positions[None])
        return cos[0], sin[0]

    def logits(self, x: Tensor) -> Tensor:
        """Return (n, vocabulary) of rows (n, width) after the last layer."""
        x = x if self.norm is None else self._ops(x).norm(x, self.norm)
        if self.project_out is not None:
            x = self._linear(x, self.project_out)
        head, bias = self.head
        if isinstance(head, Tensor | QuantizedWeight):
            return self._linear(x, head, bias)
        return head.product(x, bias, self._linear)
