"""Calls of native attention and page copies: tensors to one packed C struct, one foreign call per op."""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import MOST_LEAST
from millpond.kernels.native.structs import (
    DTYPES,
    INT32,
    TORCH_DTYPES,
    entry_point,
    flat_indices,
    readable_rows,
    shared_rows,
)
from millpond.kernels.thread_count import thread_count

#: the order of fields is that of csrc/common/args.hpp
DECODE = Struct("=48q3d").pack
COLUMNS_OF_TOKENS = Struct("=4q").pack
ATTEND = Struct("=23q2d").pack
WRITE = Struct("=34q").pack
READ = Struct("=19q").pack
PREFILL = Struct("=32q3d").pack


def decode(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    bases: Tensor,
    table: Tensor,
    lens: Tensor,
    caps: Tensor,
    recent: Tensor,
    q_pos: Tensor,
    sink_logits: Tensor | None,
    pool: list[int],
    rule: list[int],
    window: int,
    scale: float,
    softcap: float,
    decay: float,
    kept: Tensor | None = None,
    least: Tensor | None = None,
    packed: bytes = b"",
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a decoding step, see `OpSet.decode`; the tensors are those of `DecodeArgs`.

    kept and least are those of `StepRegions`; packed is the struct of the regions' packed parts, see native/pages.py,
    or empty.
    """
    q, k_new, v_new = readable_rows(q), readable_rows(k_new), readable_rows(v_new)
    table, caps, recent, q_pos = flat_indices(table), flat_indices(caps), flat_indices(recent), flat_indices(q_pos)
    sinks = None if sink_logits is None else sink_logits.float().contiguous()
    n_seq, n_heads, _ = q.shape
    result = (
        torch.empty((n_seq, n_heads, pool[3]), dtype=q.dtype),
        torch.empty((n_seq, n_heads), dtype=torch.float32),
        torch.empty((n_seq * k_new.shape[1],), dtype=INT32),
    )
    struct = decode_struct(
        q,
        k_new,
        v_new,
        bases,
        table,
        lens,
        caps,
        recent,
        q_pos,
        sinks,
        pool,
        rule,
        window,
        scale,
        softcap,
        decay,
        *result,
        *(None if spans is None else spans.contiguous() for spans in (kept, least)),
    )
    if entry_point("mp_decode_packed" if packed else "mp_decode")(struct + packed):
        raise MemoryError("no memory for the work space of the decode kernel")
    return result


def decode_struct(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    bases: Tensor,
    table: Tensor,
    lens: Tensor,
    caps: Tensor,
    recent: Tensor,
    q_pos: Tensor,
    sink_logits: Tensor | None,
    pool: list[int],
    rule: list[int],
    window: int,
    scale: float,
    softcap: float,
    decay: float,
    out: Tensor,
    lse: Tensor,
    evicted: Tensor,
    kept: Tensor | None = None,
    least: Tensor | None = None,
) -> bytes:
    """Return the C struct of a decoding step; it keeps no tensor.

    All tensors have contiguous rows, in types that kernels read.
    """
    if kept is not None and (kept.dtype is not INT32 or kept.shape[0] != q.shape[0] or not kept.is_contiguous()):
        raise OptionError(f"kept spans {tuple(kept.shape)} must be a contiguous int32 tensor (sequences, spans, 2)")
    if least is not None and (least.shape[0] != q.shape[0] or not 0 < least.shape[1] <= MOST_LEAST):
        raise OptionError(f"fewest entries of {tuple(least.shape)} spans must be (sequences, 1 to {MOST_LEAST}, 3)")
    if least is not None and (least.dtype is not INT32 or not least.is_contiguous()):
        raise OptionError("fewest entries of spans must be a contiguous int32 tensor (sequences, spans, 3)")
    if lens.dtype is not INT32 or not lens.is_contiguous():
        raise OptionError("lens is written in place: it must be a contiguous int32 tensor")
    n_seq, n_heads, _ = q.shape
    q_seq, q_head, _ = q.stride()
    k_seq, k_head, _ = k_new.stride()
    v_seq, v_head, _ = v_new.stride()
    return DECODE(
        bases.data_ptr(),
        bases.shape[1],
        *pool,
        q.data_ptr(),
        k_new.data_ptr(),
        v_new.data_ptr(),
        DTYPES[q.dtype],
        DTYPES[k_new.dtype],
        DTYPES[v_new.dtype],
        q_seq,
        q_head,
        k_seq,
        k_head,
        v_seq,
        v_head,
        table.data_ptr(),
        table.stride(0),
        lens.data_ptr(),
        caps.data_ptr(),
        recent.data_ptr(),
        q_pos.data_ptr(),
        0 if sink_logits is None else sink_logits.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        evicted.data_ptr(),
        n_seq,
        n_heads,
        k_new.shape[1],
        window,
        *rule,
        thread_count(),
        *((0, 0) if kept is None else (kept.data_ptr(), kept.shape[1])),
        *((0, 0) if least is None else (least.data_ptr(), least.shape[1])),
        scale,
        softcap,
        decay,
    )


def decode_rows(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    bases: Tensor,
    table: Tensor,
    lens: Tensor,
    q_pos: Tensor,
    sink_logits: Tensor | None,
    pool: list[int],
    rule: list[int],
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Run columns of tokens, see `DecodeRowsArgs`; both results are stored column by column."""
    q, k_new, v_new, table = readable_rows(q), readable_rows(k_new), readable_rows(v_new), flat_indices(table)
    by_column = flat_indices(q_pos.t().contiguous())
    sinks = None if sink_logits is None else sink_logits.float().contiguous()
    n_seq, n_heads, n_columns, _ = q.shape
    out = torch.empty((n_columns, n_seq, n_heads, pool[3]), dtype=q.dtype)
    lse = torch.empty((n_columns, n_seq, n_heads), dtype=torch.float32)
    unused = torch.zeros_like(lens)
    first = decode_struct(
        q[:, :, 0],
        k_new[:, :, 0],
        v_new[:, :, 0],
        bases,
        table,
        lens,
        unused,
        unused,
        by_column,
        sinks,
        pool,
        rule,
        window,
        scale,
        softcap,
        1.0,
        out,
        lse,
        unused,
    )
    if entry_point("mp_decode_rows")(first + COLUMNS_OF_TOKENS(n_columns, *(t.stride(2) for t in (q, k_new, v_new)))):
        raise MemoryError("no memory for the work space of the decode kernel")
    return out.permute(1, 2, 0, 3), lse.permute(1, 2, 0)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
    past_pos: Tensor | None,
    past_log_masses: Tensor | None,
    sink_logits: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    colsum: int,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a prefill; `colsum` is a Reduce, or -1 for an empty third result."""
    q, k, v, q_pos = readable_rows(q), readable_rows(k), readable_rows(v), flat_indices(q_pos)
    past_pos = past_pos if past_pos is None else flat_indices(past_pos)
    past_log_masses = past_log_masses if past_log_masses is None else readable_rows(past_log_masses.float())
    sink_logits = sink_logits if sink_logits is None else sink_logits.float().contiguous()
    n_heads, n_queries, key_dim = q.shape
    n_kv_heads, n_columns, value_dim = v.shape
    out = torch.empty((n_heads, n_queries, value_dim), dtype=q.dtype)
    lse = torch.empty((n_heads, n_queries), dtype=torch.float32)
    sums = torch.zeros((n_kv_heads, n_columns) if colsum >= 0 else (0, 0), dtype=torch.float32)
    if n_queries == 0:
        return out, lse, sums
    failed = entry_point("mp_prefill")(
        PREFILL(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            DTYPES[q.dtype],
            DTYPES[k.dtype],
            DTYPES[v.dtype],
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            q_pos.data_ptr(),
            *shared_rows(past_pos),
            *shared_rows(past_log_masses),
            0 if sink_logits is None else sink_logits.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            sums.data_ptr() if colsum >= 0 else 0,
            n_heads,
            n_kv_heads,
            n_queries,
            n_columns,
            n_columns - n_queries,
            key_dim,
            value_dim,
            window,
            max(colsum, 0),
            thread_count(),
            0,
            scale,
            softcap,
            decay,
        )
    )
    if failed:
        raise MemoryError("no memory for the work space of the prefill kernel")
    return out, lse, sums


def attend(
    q: Tensor,
    bases: Tensor,
    table: Tensor,
    lens: Tensor,
    members: Tensor,
    out: Tensor,
    lse: Tensor,
    pool: list[int],
    scale: float,
    softcap: float,
) -> None:
    """Update contiguous `out` and `lse` (float32) to those over the entries, too."""
    q, table, lens = readable_rows(q), flat_indices(table), flat_indices(lens)
    if not len(members) or not table.numel():
        return
    failed = entry_point("mp_attend")(
        ATTEND(
            bases.data_ptr(),
            bases.shape[1],
            *pool,
            q.data_ptr(),
            DTYPES[q.dtype],
            *q.stride()[:2],
            table.data_ptr(),
            table.stride(0),
            lens.data_ptr(),
            members.data_ptr(),
            out.data_ptr(),
            DTYPES[out.dtype],
            lse.data_ptr(),
            len(members),
            q.shape[1],
            len(table),
            thread_count(),
            scale,
            softcap,
        )
    )
    if failed:
        raise MemoryError("no memory for the work space of the attention to shared entries")


def window_signal(
    q: Tensor,
    k: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    log_masses: Tensor | None,
    sink_logits: Tensor | None,
    known_lse: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    reduce: int,
) -> Tensor:
    """Sum attention of queries that bring no columns; `reduce` is a Reduce."""
    q, k, q_pos, k_pos = readable_rows(q), readable_rows(k), flat_indices(q_pos), flat_indices(k_pos)
    log_masses = log_masses if log_masses is None else readable_rows(log_masses.float())
    sink_logits = sink_logits if sink_logits is None else sink_logits.float().contiguous()
    n_heads, n_queries, key_dim = q.shape
    n_kv_heads, n_columns, _ = k.shape
    sums = torch.zeros((n_kv_heads, n_columns), dtype=torch.float32)
    if n_queries == 0 or n_columns == 0:
        return sums
    lse = torch.empty((n_heads, n_queries)) if known_lse is None else known_lse.float().contiguous()
    failed = entry_point("mp_prefill")(
        PREFILL(
            q.data_ptr(),
            k.data_ptr(),
            0,
            DTYPES[q.dtype],
            DTYPES[k.dtype],
            DTYPES[k.dtype],
            *q.stride()[:2],
            *k.stride()[:2],
            0,
            0,
            q_pos.data_ptr(),
            *shared_rows(k_pos),
            *shared_rows(log_masses),
            0 if sink_logits is None else sink_logits.data_ptr(),
            0,
            lse.data_ptr(),
            sums.data_ptr(),
            n_heads,
            n_kv_heads,
            n_queries,
            n_columns,
            n_columns,
            key_dim,
            0,
            window,
            reduce,
            thread_count(),
            int(known_lse is not None),
            scale,
            softcap,
            1.0,
        )
    )
    if failed:
        raise MemoryError("no memory for the work space of the prefill kernel")
    return sums


def write(
    bases: Tensor,
    table: Tensor,
    start: Tensor,
    count: Tensor,
    index: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scores: Tensor | None,
    log_masses: Tensor | None,
    pool: list[int],
) -> None:
    if index.numel() == 0:
        return
    table, start, count, index = flat_indices(table), flat_indices(start), flat_indices(count), flat_indices(index)
    keys, values = readable_rows(keys), readable_rows(values)
    if positions.dtype is not INT32:
        raise OptionError(f"positions are int32, not {positions.dtype}")
    scores = scores if scores is None else scores.float()
    log_masses = log_masses if log_masses is None else log_masses.float()
    entry_point("mp_write")(
        WRITE(
            bases.data_ptr(),
            bases.shape[1],
            *pool,
            table.data_ptr(),
            table.stride(0),
            table.shape[0],
            start.data_ptr(),
            count.data_ptr(),
            index.data_ptr(),
            index.stride(0),
            index.shape[1],
            keys.data_ptr(),
            values.data_ptr(),
            positions.data_ptr(),
            0 if scores is None else scores.data_ptr(),
            0 if log_masses is None else log_masses.data_ptr(),
            DTYPES[keys.dtype],
            DTYPES[values.dtype],
            *keys.stride()[:2],
            *values.stride()[:2],
            *positions.stride(),
            *((0, 0) if scores is None else scores.stride()),
            *((0, 0) if log_masses is None else log_masses.stride()),
            thread_count(),
        )
    )


def read(
    bases: Tensor, table: Tensor, lens: Tensor, width: int, pool: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Read entries; the last result is empty if the pool has no masses."""
    n, dtype = table.shape[0], TORCH_DTYPES[pool[4]]
    keys = torch.empty((n, width, pool[2]), dtype=dtype)
    values = torch.empty((n, width, pool[3]), dtype=dtype)
    positions = torch.empty((n, width), dtype=INT32)
    scores = torch.empty((n, width), dtype=torch.float32)
    log_masses = torch.empty((n, width) if pool[5] else (0, 0), dtype=torch.float32)
    if n and width:
        table, lens = flat_indices(table), flat_indices(lens)
        entry_point("mp_read")(
            READ(
                bases.data_ptr(),
                bases.shape[1],
                *pool,
                table.data_ptr(),
                table.stride(0),
                n,
                lens.data_ptr(),
                width,
                keys.data_ptr(),
                values.data_ptr(),
                positions.data_ptr(),
                scores.data_ptr(),
                log_masses.data_ptr() if pool[5] else 0,
                thread_count(),
            )
        )
    return keys, values, positions, scores, log_masses
