"""Cache of a layer whose entries are in the host's memory while the model runs on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from millpond.cache.attention.host_attention import HostAttention, Link, NearPass
from millpond.cache.attention.sparse_values import SparseValues
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.layer.prompt_pass import PartialSpan
from millpond.cache.pages.tier_limits import TierLimits
from millpond.kernels.args import AttentionShape


@dataclass(frozen=True, slots=True)
class HostKV:
    """Layers whose keys and values are in the host's memory, or pass it from a disk.

    Attributes:
        layers: Indices of the layers.
        link: Copies between the host and the device.
        limits: Limits of all pages on the device and in the host's memory.
        sparse: Sparse values of decoding steps of these layers; None: all values are read.
    """

    layers: frozenset[int]
    link: Link
    limits: TierLimits
    sparse: SparseValues | None = None


class HostLayerCache(LayerCache):
    """Cache of one layer that attends on the host of a device.

    Queries and new entries go down, and the output comes up. A prompt's new tokens attend to each other on the device,
    where nothing else than a dense product is asked for; the host attends to the entries before them, and both outputs
    are merged.

    Args:
        *args: As of `LayerCache`.
        host_kv: The layers on the host, of which it is one.
        **more: As of `LayerCache`.
    """

    _attention_type = HostAttention
    attention: HostAttention

    def __init__(self, *args: Any, host_kv: HostKV, **more: Any) -> None:
        super().__init__(*args, **more)
        self._link, self.attention.sparse = host_kv.link, host_kv.sparse
        self._is_down = False  # what `attend` gets is on the host already

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape, hidden: Tensor | None = None
    ) -> Tensor:
        if self._is_down:
            return super().attend(q, k, v, mask, shape, hidden)
        near = None
        if q.shape[0] == 1 and q.shape[2] > 1 and self._quantized is None and mask is None:
            near = NearPass(self._link, q[0], k[0], v[0], shape)
        self.attention.near = near
        try:
            q, k, v = self._link.down(q, k, v)
            out = super().attend(q, k, v, mask, self._here(shape), hidden)
        finally:
            self.attention.near = None
        return self._link.up(out) if near is None or near.out is None else near.out[None]

    def attend_newest(
        self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, hidden: Tensor | None = None
    ) -> Tensor:
        self._is_down = True
        try:
            q, k, v = self._link.down(q, k, v)
            out = super().attend_newest(q, k, v, self._here(shape), hidden)
        finally:
            self._is_down = False
        return self._link.up(out)

    def attend_partial(self, q: Tensor, k: Tensor, v: Tensor, part: PartialSpan, shape: AttentionShape) -> Tensor:
        q, k, v = self._link.down(q, k, v)
        return self._link.up(super().attend_partial(q, k, v, part, self._here(shape)))

    def is_fusable(self, n_seq: int, shape: AttentionShape, changes_basis: bool = False) -> bool:
        """Return False: the steps of other layers run elsewhere."""
        return False

    def _here(self, shape: AttentionShape) -> AttentionShape:
        """Return a shape with its sinks on the host."""
        sinks = shape.sink_logits
        return shape if sinks is None else replace(shape, sink_logits=sinks.cpu())
