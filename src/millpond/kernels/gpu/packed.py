"""Attention over quantized pages on the GPU.

Codes are written and read as numbers by the reference, off the path of decoding.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from millpond.kernels.gpu.codes import side_constants, table_or
from millpond.kernels.gpu.common import block_of, page_logs, rows_of
from millpond.kernels.gpu.packed_attend import attend_packed
from millpond.kernels.packed.layout import RUN
from millpond.kernels.packed.regions import PackedRegions


def attend_codes(
    packed: PackedRegions,
    q: Tensor,
    where: tuple[Any, ...],
    q_pos: Tensor,
    outputs: tuple[Any, ...],
    settings: tuple[float, float, int],
    flags: dict[str, Any],
    dot: tl.dtype,
    grid: tuple[int, int],
) -> None:
    """Launch `attend_packed`. outputs: the partial results, the logits, all splits, the first of these."""
    pages, layout = packed.pages, packed.pages.layout
    numbers = [table_or(numbers, q) for numbers, _ in layout.tables]
    given = (packed.key_scales, packed.key_zeros, packed.channels, packed.balance)
    rope = packed.rope
    turning = (q, q, q, 0) if rope is None else (rope.by_channel, rope.cos, rope.sin, rope.cos.shape[1])
    flags = {**flags, "KEY_DIM": layout.key_dim, "KEY_BLOCK": block_of(layout.key_dim)}
    # wide heads and float32 products take more registers than four warps have
    wide = max(layout.key_dim, layout.value_dim) > 128 or dot == tl.float32
    attend_packed[grid](
        q,
        *q.stride()[:2],
        *where,
        packed.lens,
        q_pos,
        *outputs,
        *numbers,
        *(q if x is None else rows_of(x) for x in given),
        *turning,
        *settings,
        **side_constants("K", layout.key, layout.key_offsets, layout.key_dim),
        **side_constants("V", layout.value, layout.value_offsets, layout.value_dim),
        PAGE_BYTES=layout.page_bytes,
        DOT=dot,
        BLOCK=RUN,
        HAS_CHANNELS=packed.channels is not None,
        HAS_BALANCE=packed.balance is not None,
        HAS_ROPE=rope is not None,
        HAS_MASSES=pages.masses,
        **page_logs(pages),
        **flags,
        num_warps=8 if wide else 4,
        num_stages=2,
    )
