"""One decoding step of one layer: four small kernels, no wait for the host, fixed shapes.

    attend   per (region, split): attention of a whole group over SPLIT slots; logits to scratch if a rule needs them
    combine  per (sequence, query head): the splits, the new entry and the sink become output and log-sum-exp
    score    per (region, chunk): the accumulator, and the lowest value of the chunk
    settle   per region: the victim, the store of the new entry, the length

Grids follow the width of the table, not the lengths, which only the device knows: programs past a length return at
once, so a CUDA graph holds the step. Splits have a fixed size and are combined in order, so an output depends neither
on the batch nor on the run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.kernels.gpu.attend import attend, combine
from millpond.kernels.gpu.common import TYPES, block_of, check, dot_type, on_its_device, page_logs, rows_of
from millpond.kernels.gpu.settle import score, settle
from millpond.kernels.pages import PageArrays
from millpond.kernels.rules import DecodeRule, Evict, Signal

HASH_SEED = 0xC2B2AE3D  #: factor of the seed in `reference.hash_priority`


class Tuning(NamedTuple):
    """Sizes that change speed and not meaning (SPLIT also changes the order of rounding)."""

    split: int = 256  #: slots per program of `attend`, a multiple of block
    block: int = 64  #: slots per step inside it
    warps: int = 4
    stages: int = 3
    chunk: int = 512  #: slots per program of `score`


TUNING = Tuning()


@on_its_device
def decode(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    pages: PageArrays,
    table: Tensor,
    lens: Tensor,
    caps: Tensor,
    recent: Tensor,
    q_pos: Tensor,
    rule: DecodeRule,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check(q.device, q.dtype, pages.dtype)
    assert lens.stride() == (1,), "lens is written in place"
    n_seq, n_heads, _ = q.shape
    n_kv_heads = k_new.shape[1]
    n_regions, group = n_seq * n_kv_heads, n_heads // n_kv_heads
    n_splits = triton.cdiv(table.shape[1] * pages.slots, TUNING.split)
    width = n_splits * TUNING.split
    signals = rule.signal is not Signal.NONE

    def scratch(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=q.device)

    out = torch.empty(n_seq, n_heads, pages.value_dim, dtype=q.dtype, device=q.device)
    lse = scratch(n_seq, n_heads)
    evicted = torch.empty(n_regions, dtype=torch.int32, device=q.device)
    if n_regions == 0:
        return out, lse, evicted

    # rounded to the storage dtype, as they will be read later
    q, k_new, v_new = rows_of(q), rows_of(k_new.to(pages.dtype)), rows_of(v_new.to(pages.dtype))
    table, caps, recent, q_pos = rows_of(table), caps.contiguous(), recent.contiguous(), q_pos.contiguous()
    logits = scratch(n_regions, group, width) if signals else lse
    new_logits = scratch(n_seq, n_heads)
    partial = (scratch(n_regions, n_splits, group, pages.value_dim), *scratch(2, n_regions, n_splits, group))
    dims = {
        "KEY_DIM": pages.key_dim, "VALUE_DIM": pages.value_dim,
        "KEY_BLOCK": block_of(pages.key_dim), "VALUE_BLOCK": block_of(pages.value_dim),
    }  # fmt: skip
    heads = {"HEADS": n_kv_heads, "GROUP": group}
    where = (pages.bases, pages.n_arenas, table, table.stride(0))
    stored = {"TYPE": TYPES[pages.dtype], **page_logs(pages)}
    cap = {"HAS_CAP": softcap != 0.0}
    dot = dot_type(q.dtype, pages.dtype)
    # wide heads take more shared memory, float32 products more registers
    shrink = max(1, block_of(max(pages.key_dim, pages.value_dim)) // 128) * (4 if dot == tl.float32 else 1)
    block = max(16, TUNING.block // shrink)

    if n_splits and pages.n_arenas:
        attend[(n_regions, n_splits)](
            q, *q.stride()[:2], *where, lens, q_pos, *partial, logits, n_splits,
            float(scale), float(softcap), window,
            DOT=dot, SPLIT=TUNING.split, BLOCK=block, GROUP_BLOCK=block_of(group),
            HAS_WINDOW=window > 0, HAS_MASSES=pages.masses, KEEP_LOGITS=signals, **dims, **heads, **stored, **cap,
            num_warps=TUNING.warps, num_stages=TUNING.stages if shrink == 1 else 2,
        )  # fmt: skip
    combine[(n_regions, group)](
        q, *q.stride()[:2], k_new, *k_new.stride()[:2], v_new, *v_new.stride()[:2], lens, q_pos, *partial, n_splits,
        sink_logits.float().contiguous() if sink_logits is not None else lse, out, lse, new_logits,
        float(scale), float(softcap), SPLIT=TUNING.split, HAS_SINK=sink_logits is not None, **dims, **heads, **cap,
    )  # fmt: skip

    n_chunks = triton.cdiv(width, TUNING.chunk)
    lowest = (scratch(n_regions, n_chunks), *torch.empty(2, n_regions, n_chunks, dtype=torch.int32, device=q.device))
    shared = rule.shared and rule.evict.by_score and n_kv_heads > 1
    seed = rule.seed * HASH_SEED & 0xFFFFFFFF
    choice = (rule.sinks, window, seed - (1 << 32) if seed >> 31 else seed)
    flags = {
        "SIGNAL": int(rule.signal), "REDUCE": int(rule.reduce), "EVICT": int(rule.evict), "SHARED": shared,
        "HASH_HEADS": 1 if rule.shared else n_kv_heads,
        "WIDTH": rule.spacing.width, "SHIFT": rule.spacing.shift, "STRIDE": rule.spacing.stride,
    }  # fmt: skip
    chooses = rule.evict is not Evict.NEVER
    # a shared value reads the accumulators of the other heads, so they are all updated first
    passes = [(signals, False), (False, chooses)] if shared and signals else [(signals, chooses)]
    for update, choose in passes:
        if (update or choose) and n_chunks and pages.n_arenas:
            score[(n_regions, n_chunks)](
                *where, lens, caps, recent, q_pos, logits, width, lse, *lowest, n_chunks, float(rule.decay), *choice,
                CHUNK=TUNING.chunk, UPDATE=update, CHOOSE=choose, HAS_WINDOW=window > 0, **heads, **flags,
                **page_logs(pages),
            )  # fmt: skip
    settle[(n_regions,)](
        *where, lens, caps, recent, q_pos, k_new, *k_new.stride()[:2], v_new, *v_new.stride()[:2], new_logits, lse,
        *lowest, n_chunks, evicted, *choice,
        CHUNK=TUNING.chunk, GROUP_BLOCK=block_of(group), HAS_WINDOW=window > 0, HAS_MASSES=pages.masses,
        **dims, **heads, **stored, **flags,
    )  # fmt: skip
    return out, lse, evicted
