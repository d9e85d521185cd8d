"""Block: one layer of a decoder over packed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from millpond.kernels.decoder_ops import DecoderOps, Norm, Projection, Rest

#: attend(layer, q (N, n_heads, D), k, v (N, n_kv_heads, D)) -> (N, n_heads * D): all strides, heads contiguous.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

#: cos and sin, (N, dim) each.
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TurningAttend:
    """Attention that rotates queries and keys itself.

    Attributes:
        call: call(layer, q, k, v, angles) as `Attend`; q and k are rotated already where the angles are None.
    """

    call: Callable[[int, Tensor, Tensor, Tensor, Angles | None], Tensor]


#: give_hidden(layer, hidden (N, width)): what the attention of a layer reads, the normed hidden states.
GiveHidden = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Block:
    """Layer, described by its projections and norms.

    Attributes:
        qkv: Projection into queries, keys and values; a single matrix holds those of each head one after another
            (GPT-NeoX).
        out: Projection out of attention.
        up: Projection into the feed-forward: one matrix, or a gate and what it gates.
        down: Projection out of the feed-forward.
        q_norm: Norm of each head of queries before RoPE (Qwen3).
        k_norm: Norm of each head of keys before RoPE (Qwen3).
        q_scale: Factor of queries (OPT).
        norms_behind: Norms after attention and feed-forward, each with its residual, in models that have them there
            (OPT-350m).
        parallel: Attention and feed-forward read the same rows (GPT-NeoX); else one after the other.
    """

    index: int
    head_dim: int
    qkv: Projection
    out: Projection
    up: Projection
    down: Projection
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    q_scale: float = 1.0
    norms_behind: tuple[Norm, Norm] | None = None
    parallel: bool = False

    @property
    def in_order(self) -> bool:
        """Whether the layer is q, k, v with RoPE, attention, the rest, see `dense.in_one_call`."""
        besides = (self.q_norm, self.k_norm, self.norms_behind)
        plain = all(norm is None for norm in besides) and self.q_scale == 1 and not self.parallel
        return plain and len(self.qkv.parts) == 3

    def forward(
        self,
        x: Tensor,
        rotary: Angles | None,
        attend: Attend | TurningAttend,
        dense: DecoderOps,
        rows: Tensor | None = None,
        give_hidden: GiveHidden | None = None,
    ) -> Tensor:
        """Return the rows x (N, width) after the layer; their memory may be written over.

        With `rows` (n,) only these are returned, though all take part in attention; rotary is cos and sin, (N, dim)
        each, or None if positions are not rotated. `give_hidden` is told what attention reads.
        """
        if give_hidden is not None:
            give_hidden(self.index, x.clone() if self.qkv.norm is None else dense.norm(x, self.qkv.norm))
        late = isinstance(attend, TurningAttend) and dense.turns_late
        q, k, v = self._heads(x, None if late else rotary, dense)
        q = q if self.q_scale == 1 else q * self.q_scale
        if isinstance(attend, TurningAttend):
            seen = attend.call(self.index, q, k, v, rotary if late else None)
        else:
            seen = attend(self.index, q, k, v)
        if rows is not None:
            x, seen = x[rows], seen[rows]
        return self._behind_attention(x, seen, dense)

    def _heads(self, x: Tensor, rotary: Angles | None, dense: DecoderOps) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values after RoPE, if it is given: (N, heads, D) each."""
        if rotary is not None and len(self.qkv.parts) == 3 and self.q_norm is self.k_norm is None:
            return dense.heads(x, self.qkv, self.head_dim, *rotary)
        q, k, v = self.heads(dense.apart(x, self.qkv))
        if self.q_norm is not None:
            q = dense.norm(q, self.q_norm)
        if self.k_norm is not None:
            k = dense.norm(k, self.k_norm)
        if rotary is not None:
            dense.rotate_(q, k, *rotary)
        return q, k, v

    @property
    def build(self) -> tuple[Any, ...]:
        """Facts that choose the kernels of a layer: all but its weights and its index."""
        norms = (self.q_norm, self.k_norm, *(self.norms_behind or ()))
        projections = (self.qkv, self.out, self.up, self.down)
        return (
            self.head_dim,
            self.q_scale,
            self.parallel,
            self.norms_behind is None,
            tuple(map(_build_of_norm, norms)),
            *((_build_of_norm(taken.norm), taken.act, taken.whole is None) for taken in projections),
            *(
                (type(weight), tuple(weight.shape), weight.nbytes, weight.dtype, bias is None)
                for taken in projections
                for weight, bias in taken.parts
            ),
        )

    @cached_property
    def rest(self) -> Rest:
        """Projections and norms after attention, if norms come first."""
        return Rest(self.out, self.up, self.down)

    def _behind_attention(self, x: Tensor, seen: Tensor, dense: DecoderOps) -> Tensor:
        if self.parallel:
            return dense.added(seen, self.out, dense.added(dense.activated(x, self.up), self.down, x))
        if self.norms_behind is None:
            return dense.behind(seen, x, self.rest)
        x = dense.norm(dense.added(seen, self.out, x), self.norms_behind[0])
        x = dense.added(dense.activated(x, self.up), self.down, x)
        return dense.norm(x, self.norms_behind[1])

    def heads(self, projected: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (N, heads, D) of queries, keys and values."""
        n, dim = projected[0].shape[0], self.head_dim
        if len(projected) == 1:
            q, k, v = torch.split(projected[0].view(n, -1, 3 * dim), dim, -1)
        else:
            q, k, v = (part.view(n, -1, dim) for part in projected)
        return q, k, v


def _build_of_norm(norm: Norm | None) -> tuple[Any, ...] | None:
    return None if norm is None else (len(norm.weight), norm.bias is None, norm.eps, norm.centred)
