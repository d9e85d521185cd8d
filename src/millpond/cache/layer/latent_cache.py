"""Cache of a layer whose model stores one latent per token and expands it to keys and values (MLA).

A page holds latents: "key" and "value" are the two parts that the model hands in, one KV head for all query heads.
The model expands kept and new latents itself and returns per-head keys and values. Each is found by the
position of its token, so plans, drafts and rewinds work as for every other layer; only attention reads elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from millpond.cache.attention.mla import LatentExpansion, MLAAttention
from millpond.cache.layer.layer_cache import LayerCache
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape


class LatentCache(LayerCache):
    """A `LayerCache` of latents of `latent_dim` and `rope_dim` numbers; entries of another shape are cached as ever."""

    attention: MLAAttention
    _attention_type = MLAAttention

    def __init__(self, *args: Any, latent_dim: int, rope_dim: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dims = (latent_dim, rope_dim)
        self._offered: tuple[Tensor, Tensor] | None = None
        self._kept = torch.zeros(0, 0, dtype=torch.int32)

    # ------------------------------------------------------------------ to the model and back

    def offer(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The kept latents of all sequences (padded, in any order), then the new ones: (S, 1, n + Q, dim)."""
        self._offered = self.attention.expansion = None
        if (k.shape[-1], v.shape[-1]) != self._dims or k.shape[1] != 1:
            return k, v
        # what is attended to is what is stored, so that no split of a text into passes changes the result
        storage = self._pool(*self._dims, k.dtype, k.device).arrays.dtype
        k, v = self._offered = k.to(storage).to(k.dtype), v.to(storage).to(v.dtype)
        table = self._table
        if table is None or table.n_seq != k.shape[0]:
            self._kept = torch.zeros(k.shape[0], 0, dtype=torch.int32, device=k.device)
            return k, v
        dense = ops.read(table.regions, int(table.lengths().max(initial=0)))
        self._kept = dense.positions
        return torch.cat([dense.keys[:, None].to(k.dtype), k], 2), torch.cat([dense.values[:, None].to(v.dtype), v], 2)

    def accept(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The new latents; `k` and `v` (S, H, n + Q, D) are what the model made of all that it was offered."""
        if self._offered is None:
            return k, v
        self.attention.expansion = LatentExpansion(k, v, self._kept, self.columns)
        return self._offered

    def forget(self) -> None:
        """Drop the expanded keys of the last pass; only taking tokens back needs them."""
        self._offered = self.attention.expansion = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> Tensor:
        """As `LayerCache.attend`; k and v are latents, the output has the model's own value size."""
        if self.attention.expansion is not None:
            span = self.timeline.span(self.columns, q.shape[2], q.shape[0], mask, q.device)
            self.attention.expansion.place(span)
        return super().attend(q, k, v, mask, shape)

    def attend_newest(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        return self.attend(q[:, :, None], k[:, :, None], v[:, :, None], None, shape)[:, :, 0]

    def reset(self) -> None:
        self.forget()
        super().reset()
