# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The new entry of a decoding step: its rotation, which `attend` may do, and its store.

Products are rounded where `dense.rotate_heads` rounds them, so the numbers are its numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from millpond.kernels.args import DecodeArgs
from millpond.kernels.decode_rules import Signal
from millpond.kernels.gpu.common import KEYS, LOG_MASSES, POSITIONS, SCORES, TYPES, VALUES, rows_of, slot_rows


@triton.jit
def turned(row, at, ok, cos, sin, HALF: tl.constexpr, TYPE: tl.constexpr):
    """Return channels `at`, all in order, of heads at `row`; rotated unless HALF is 0.

    They are 0 where not `ok`. `cos` and `sin` point to those of the first 2 * HALF channels.
    """
    x = tl.load(row + at, mask=ok, other=0.0)
    if HALF == 0:
        return x
    else:
        turns = ok & (at < 2 * HALF)
        partner = tl.where(at < HALF, at + HALF, at - HALF)
        if HALF % 8 == 0:  # so that 16 bytes are loaded at once
            partner = tl.max_contiguous(tl.multiple_of(partner, [1, 8]), [1, 8])
        across = tl.load(row + partner, mask=turns, other=0.0).to(tl.float32)
        across = across * tl.load(sin + at, mask=at < 2 * HALF, other=0.0).to(tl.float32)
        across = across.to(TYPE).to(tl.float32)
        along = (x.to(tl.float32) * tl.load(cos + at, mask=at < 2 * HALF, other=0.0).to(tl.float32)).to(TYPE)
        y = along.to(tl.float32) + tl.where(at < HALF, -across, across)
        return tl.where(turns, y.to(TYPE).to(x.dtype), x)


@triton.jit
def store_entry(
    bases,
    n_arenas,
    arena,
    row,
    stores,
    d,
    k_row,
    e,
    v_row,
    here,
    score,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TYPE: tl.constexpr,
    HAS_MASSES: tl.constexpr,
):
    """Write key (K,), value (V,), position and score of an entry into a slot, if it `stores`."""
    at = slot_rows(bases, n_arenas, KEYS, arena, row, stores, KEY_DIM, TYPE)
    tl.store(at + d, k_row, mask=d < tl.where(stores, KEY_DIM, 0))
    at = slot_rows(bases, n_arenas, VALUES, arena, row, stores, VALUE_DIM, TYPE)
    tl.store(at + e, v_row, mask=e < tl.where(stores, VALUE_DIM, 0))
    tl.store(slot_rows(bases, n_arenas, POSITIONS, arena, row, stores, 1, tl.int32), here, mask=stores)
    tl.store(slot_rows(bases, n_arenas, SCORES, arena, row, stores, 1, tl.float32), score, mask=stores)
    if HAS_MASSES:
        tl.store(slot_rows(bases, n_arenas, LOG_MASSES, arena, row, stores, 1, tl.float32), 0.0, mask=stores)


# ---------------------------------------------------------------------------------------------- at launch


class Turn(NamedTuple):
    """The rotation that `attend` does."""

    where: tuple[Any, ...]  #: cosines and their stride, sines and theirs
    constants: dict[str, Any]

    @classmethod
    def of(cls, args: DecodeArgs) -> Turn | None:
        """Return the rotation of a step, an empty one where it has no angles.

        None: the rows are rotated before. That is where `attend` cannot do it, or had better not: the registers that it
        takes would leave fewer programs on a core, but for those that keep logits. Of float32 a compiler may join a
        product with the sum behind it.
        """
        if args.angles is None:
            return cls((args.q, 0, args.q, 0), {"HALF": 0, "TURN_TYPE": tl.float32})
        cos, sin = args.angles
        regions, half = args.regions, cos.shape[-1] // 2
        pages = regions.plain.pages
        wanted = regions.rule.signal is not Signal.NONE and regions.packed is None
        alike = args.q.dtype is args.k_new.dtype is pages.dtype and cos.dtype is sin.dtype and cos.dtype in TYPES
        type = torch.promote_types(args.q.dtype, cos.dtype)
        launched = pages.n_arenas and regions.plain.table.shape[1]
        if not (wanted and alike and launched) or type is torch.float32 or cos.shape[-1] != 2 * half or not half:
            return None
        cos, sin = rows_of(cos), rows_of(sin)
        return cls((cos, cos.stride(0), sin, sin.stride(0)), {"HALF": half, "TURN_TYPE": TYPES[type]})
