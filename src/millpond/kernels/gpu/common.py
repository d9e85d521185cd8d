# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Common parts of the Triton kernels: slot addresses, logits, launch checks. Independent of policies.

Logits inside the kernels are in base 2 (natural logit * log2 e), because the hardware exponential is exp2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from millpond.errors import OptionError
from millpond.kernels.card import Card
from millpond.kernels.decode_rules import Reduce
from millpond.kernels.packed.layout import PackedArrays
from millpond.kernels.pages import PageArrays

P = ParamSpec("P")
R = TypeVar("R")

INTERPRET: bool = bool(triton.knobs.runtime.interpret)
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))

# which row of PageArrays.bases
KEYS = tl.constexpr(0)
VALUES = tl.constexpr(1)
POSITIONS = tl.constexpr(2)
SCORES = tl.constexpr(3)
LOG_MASSES = tl.constexpr(4)

REDUCE_MEAN = tl.constexpr(int(Reduce.MEAN))
REDUCE_MAX = tl.constexpr(int(Reduce.MAX))


# ---------------------------------------------------------------------------------------------- in kernels


@triton.jit
def locate(table_row, slot, ok, LOG_SLOTS: tl.constexpr, LOG_PAGES: tl.constexpr):
    """Return the arena (int32) and the row in it (int64) of each slot of a region.

    Nothing is looked up where not `ok`.
    """
    page = tl.load(table_row + (slot >> LOG_SLOTS), mask=ok, other=0)
    row = (page & ((1 << LOG_PAGES) - 1)).to(tl.int64) << LOG_SLOTS
    return page >> LOG_PAGES, row + (slot & ((1 << LOG_SLOTS) - 1))


@triton.jit
def slot_rows(bases, n_arenas, WHICH: tl.constexpr, arena, row, ok, DIM: tl.constexpr, TYPE: tl.constexpr):
    """Return pointers to the first number of each row of one of the arrays of the pages."""
    base = tl.load(bases + WHICH * n_arenas + arena, mask=ok, other=0)
    # arenas come from the allocator, so they start at a multiple of 16 bytes; an address from memory does not say so
    return tl.multiple_of(base.to(tl.pointer_type(TYPE)), 16) + row * DIM


@triton.jit
def tile_rows(
    bases,
    n_arenas,
    WHICH: tl.constexpr,
    table_row,
    first,
    slot,
    ok,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Return `slot_rows` of the slots first .. first + BLOCK - 1.

    One scalar look-up where a tile is inside one page.
    """
    if BLOCK <= (1 << LOG_SLOTS):
        page = tl.load(table_row + (first >> LOG_SLOTS))
        base = tl.load(bases + WHICH * n_arenas + (page >> LOG_PAGES))
        row = (page & ((1 << LOG_PAGES) - 1)).to(tl.int64) << LOG_SLOTS
        pointer = tl.multiple_of(base.to(tl.pointer_type(TYPE)), 16) + row * DIM
        return pointer + (slot & ((1 << LOG_SLOTS) - 1)) * DIM
    else:
        arena, row = locate(table_row, slot, ok, LOG_SLOTS, LOG_PAGES)
        return slot_rows(bases, n_arenas, WHICH, arena, row, ok, DIM, TYPE)


@triton.jit
def logit2(product, scale, softcap, HAS_CAP: tl.constexpr):
    """Return the logit of a product q.k, in base 2."""
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); exp may overflow to inf, which gives 1
        doubled = tl.exp2(product * (scale / softcap) * (2.0 * LOG2_E))
        return (1.0 - 2.0 / (doubled + 1.0)) * (softcap * LOG2_E)
    else:
        return product * (scale * LOG2_E)


@triton.jit
def seen_logits(
    q_tile,
    row_pos,
    k_tile,
    position,
    bias,
    scale,
    softcap,
    window,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASSES: tl.constexpr,
):
    """Return logits (ROWS, BLOCK) in base 2, -inf where a row does not see a column.

    They are of rows q_tile (ROWS, K) and columns k_tile (K, BLOCK). bias (BLOCK,): log masses in base 2.
    """
    x = logit2(tl.dot(q_tile, k_tile, input_precision="ieee"), scale, softcap, HAS_CAP)
    if HAS_MASSES:
        x += bias[None, :]
    visible = (position >= 0)[None, :] & (position[None, :] <= row_pos[:, None])
    if HAS_WINDOW:
        visible = visible & (row_pos[:, None] - position[None, :] < window)
    return tl.where(visible, x, -INF)


@triton.jit
def softmax_step(x, top, total):
    """Take logits x (ROWS, BLOCK) in base 2 into a softmax.

    Returns its maximum and sum (ROWS,), the weights (ROWS, BLOCK) of x, and the factor (ROWS,) on what came before.
    """
    new_top = tl.maximum(top, tl.max(x, 1))
    finite = tl.where(new_top == -INF, 0.0, new_top)  # nothing visible so far: exp2(-inf - 0) = 0
    p = tl.exp2(x - finite[:, None])
    fade = tl.exp2(top - finite)
    return new_top, total * fade + tl.sum(p, 1), p, fade


# ---------------------------------------------------------------------------------------------- at launch


def on_its_device(op: Callable[P, R]) -> Callable[P, R]:
    """Run `op` with its first argument's device current: Triton launches on no other.

    Raises:
        OptionError: one of its kernels does not compile there, or takes more of a resource than the device has.
    """

    @wraps(op)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device: torch.device = next(iter((*args, *kwargs.values()))).device  # type: ignore[attr-defined]
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                return op(*args, **kwargs)
            except TritonError as error:
                raise _not_compiled(f"{op.__module__}.{op.__name__}", device, error) from error

    return run


def _not_compiled(op: str, device: torch.device, error: Exception) -> OptionError:
    """Return the error of a kernel that a device does not take: nothing else replaces it."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    where = str(Card.of(device)) if device.type == "cuda" else "the interpreter of Triton"
    return OptionError(
        f"{op}: its kernel does not compile for {where} with Triton {triton.__version__} ({reason}); "
        "MILLPOND_KERNELS=reference runs torch's operators in place of all kernels, slower"
    )


def check(device: torch.device, *dtypes: torch.dtype) -> None:
    """Refuse tensors that the kernels cannot run on.

    Raises:
        OptionError: tensors that are not on a CUDA device, or a dtype without a kernel.
    """
    if device.type != "cuda" and not INTERPRET:
        raise OptionError(f"the gpu kernels need CUDA tensors, not {device}; TRITON_INTERPRET=1 runs them on the CPU")
    for dtype in dtypes:
        if dtype not in TYPES:
            raise OptionError(f"the gpu kernels take float32, float16 and bfloat16, not {dtype}")


def dot_type(left: torch.dtype, right: torch.dtype) -> tl.dtype:
    """Return the operand type of a matrix product: the common dtype, or float32.

    The interpreter of Triton multiplies the bit patterns of bfloat16, so there it is float32 too.
    """
    if left != right or (INTERPRET and left == torch.bfloat16):
        return tl.float32
    return TYPES[left]


def block_of(dim: int) -> int:
    """Return the power of two, at least 16, that holds `dim` numbers.

    16 is the least a matrix product takes.
    """
    return max(16, 1 << (dim - 1).bit_length())


def rows_of(tensor: Tensor) -> Tensor:
    """Return the tensor with its last axis contiguous; a copy only if it is not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def page_logs(pages: PageArrays | PackedArrays) -> dict[str, int]:
    """Return the shape of pages as shift widths."""
    return {"LOG_SLOTS": pages.slots.bit_length() - 1, "LOG_PAGES": pages.pages_per_arena.bit_length() - 1}
