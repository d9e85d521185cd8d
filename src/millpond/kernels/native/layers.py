"""All layers of a decoder for decoding rows, in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

import torch
from torch import Tensor

from millpond.kernels.args import StepRegions
from millpond.kernels.native.abi import INT32, decode_struct, entry_point, pool_numbers, rule_numbers
from millpond.kernels.native.decoder_rows import Behind, Linears
from millpond.kernels.native.packed import PACKED_BYTES, regions_struct

COUNT = Struct("=q").pack
#: in place of the struct of packed regions, where there are none
NOT_PACKED = bytes(PACKED_BYTES)


class Layers:
    """Matrices and norms of layers, each with queries, keys and values of three matrices that turn, made ready once.

    The tensors must stay where they are as long as this is called; it does not keep them.
    """

    def __init__(self, parts: Sequence[tuple[Linears, Behind]], head_dim: int) -> None:
        self._parts, self._dim = parts, head_dim
        self._call = entry_point("mp_layers")

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, regions: Sequence[StepRegions]) -> Tensor:
        """Rows x (N, width), contiguous, one of each sequence, go through all layers in place.

        Args:
            cos, sin: (N, <= head_dim), as for `rotate_`. regions: of each layer; lengths and pages change as in
                `ops.decode`.

        Returns:
            (layers, N, n_heads): the log-sum-exp of each layer's attention.
        """
        first, cos, sin = self._parts[0][0], cos.contiguous(), sin.contiguous()
        q, k, v = heads = first.room_for_heads(len(x), self._dim)
        seen = torch.empty((*q.shape[:2], v.shape[-1]), dtype=x.dtype)
        lse = torch.empty((len(regions), *q.shape[:2]), dtype=torch.float32)
        evicted = torch.empty(len(x) * k.shape[1], dtype=INT32)
        before, turn = first.heads_struct(x, cos, sin, *heads)
        behind = Behind.struct(seen, x, x)
        structs, kept = [COUNT(len(regions))], []
        for (into, rest), r, sums in zip(self._parts, regions, lse, strict=True):
            shape, plain = r.shape, r.plain
            if r.packed is not None:
                r.packed.check(len(plain.table), plain.pages.key_dim)
            sinks = None if shape.sink_logits is None else shape.sink_logits.float().contiguous()
            kept.append(sinks)  # a struct keeps no tensor
            decoding = decode_struct(
                q,
                k,
                v,
                plain.pages.bases,
                plain.table,
                plain.lens,
                r.caps,
                r.recent,
                r.q_pos,
                sinks,
                pool_numbers(plain.pages),
                rule_numbers(r.rule),
                shape.window,
                shape.scale,
                shape.softcap,
                r.rule.decay,
                seen,
                sums,
                evicted,
                r.kept,
                r.least,
            )
            packed = NOT_PACKED if r.packed is None else regions_struct(r.packed)
            structs += (before, into.same, turn, decoding, packed, behind, rest.same)
        if self._call(b"".join(structs)):
            raise MemoryError("no memory for the work space of a layer")
        return lse
