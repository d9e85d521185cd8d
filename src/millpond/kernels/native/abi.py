"""Calls of native attention and page copies: tensors to one packed C struct, one foreign call per op."""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.args import (
    AttendArgs,
    AttendOutput,
    DecodeRowsArgs,
    EntryRows,
    PrefillArgs,
    SharedDecodeArgs,
    StepRegions,
    WindowSignalArgs,
)
from millpond.kernels.decode_rules import KEEP_ALL, MOST_LEAST
from millpond.kernels.eager.attention import empty_output
from millpond.kernels.native.structs import (
    DTYPES,
    INT32,
    TORCH_DTYPES,
    address_of,
    entry_point,
    flat_indices,
    pool_numbers,
    readable_rows,
    rule_numbers,
    run,
    shared_rows,
)
from millpond.kernels.pages import PageArrays
from millpond.kernels.thread_count import thread_count

#: the order of fields is that of csrc/common/args.hpp
DECODE = Struct("=48q3d").pack
COLUMNS_OF_TOKENS = Struct("=4q").pack
N_RUNS = Struct("=q").pack
ATTEND = Struct("=23q2d").pack
WRITE = Struct("=34q").pack
READ = Struct("=19q").pack
PREFILL = Struct("=32q3d").pack


class DecodeValues(NamedTuple):
    """Tensors of `DecodeArgs` and numbers of a decoding step.

    Their order is that of the schema of `millpond::decode`.
    """

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    bases: Tensor
    table: Tensor
    lens: Tensor
    caps: Tensor
    recent: Tensor
    q_pos: Tensor
    sink_logits: Tensor | None
    pool: list[int]
    rule: list[int]
    window: int
    scale: float
    softcap: float
    decay: float
    kept: Tensor | None = None
    least: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, k_new: Tensor, v_new: Tensor, regions: StepRegions) -> DecodeValues:
        """Return the values of a step of a layer over its plain regions, sinks in float32."""
        (pages, table, lens), rule, shape = regions.plain.parts, regions.rule, regions.shape
        tensors = (q, k_new, v_new, pages.bases, table, lens, regions.caps, regions.recent, regions.q_pos)
        lists, window, scale = (pool_numbers(pages), rule_numbers(rule)), shape.window, shape.scale
        sinks = None if shape.sink_logits is None else shape.sink_logits.float().contiguous()
        kept, least = regions.kept, regions.least
        return cls(*tensors, sinks, *lists, window, scale, shape.softcap, rule.decay, kept, least)


def decode(values: DecodeValues, others: bytes = b"", function: str = "mp_decode") -> tuple[Tensor, Tensor, Tensor]:
    """Run a decoding step, see `OpSet.decode`.

    Args:
        values: Tensors and numbers of the step.
        others: What the function takes behind the struct of the step: that of the regions' packed parts, see
            native/pages.py, or those of shared entries.
        function: mp_decode, mp_decode_packed or mp_decode_shared.
    """
    q, k_new, v_new, bases, table, lens, caps, recent, q_pos, sink_logits = values[:10]
    q, k_new, v_new = readable_rows(q), readable_rows(k_new), readable_rows(v_new)
    table, caps, recent, q_pos = flat_indices(table), flat_indices(caps), flat_indices(recent), flat_indices(q_pos)
    sinks = None if sink_logits is None else sink_logits.float().contiguous()
    spans = [None if span is None else span.contiguous() for span in values[16:]]
    n_seq, n_heads, _ = q.shape
    result = (
        torch.empty((n_seq, n_heads, values.pool[3]), dtype=q.dtype),
        torch.empty((n_seq, n_heads), dtype=torch.float32),
        torch.empty((n_seq * k_new.shape[1],), dtype=INT32),
    )
    tensors = (q, k_new, v_new, bases, table, lens, caps, recent, q_pos, sinks)
    struct = decode_struct(DecodeValues(*tensors, *values[10:16], *spans), *result)
    run(function, "the decode kernel", struct + others)
    return result


def decode_struct(values: DecodeValues, out: Tensor, lse: Tensor, evicted: Tensor) -> bytes:
    """Return the C struct of a decoding step; it keeps no tensor.

    All tensors have contiguous rows, in types that kernels read.
    """
    q, k_new, v_new, bases, table, lens, caps, recent, q_pos, sinks = values[:10]
    pool, rule, window, scale, softcap, decay, kept, least = values[10:]
    if kept is not None and (kept.dtype is not INT32 or kept.shape[0] != q.shape[0] or not kept.is_contiguous()):
        raise OptionError(f"kept spans {tuple(kept.shape)} must be a contiguous int32 tensor (sequences, spans, 2)")
    if least is not None and (least.shape[0] != q.shape[0] or not 0 < least.shape[1] <= MOST_LEAST):
        raise OptionError(f"fewest entries of {tuple(least.shape)} spans must be (sequences, 1 to {MOST_LEAST}, 3)")
    if least is not None and (least.dtype is not INT32 or not least.is_contiguous()):
        raise OptionError("fewest entries of spans must be a contiguous int32 tensor (sequences, spans, 3)")
    if lens.dtype is not INT32 or not lens.is_contiguous():
        raise OptionError("lens is written in place: it must be a contiguous int32 tensor")
    n_seq, n_heads, _ = q.shape
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
        *q.stride()[:2],
        *k_new.stride()[:2],
        *v_new.stride()[:2],
        table.data_ptr(),
        table.stride(0),
        lens.data_ptr(),
        caps.data_ptr(),
        recent.data_ptr(),
        q_pos.data_ptr(),
        address_of(sinks),
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


def decode_rows(args: DecodeRowsArgs) -> AttendOutput:
    """Run `OpSet.decode_rows`; both results are stored column by column."""
    (pages, table, lens), shape = args.regions.parts, args.shape
    new = q, k_new, v_new = readable_rows(args.q), readable_rows(args.k_new), readable_rows(args.v_new)
    by_column = flat_indices(args.q_pos.t().contiguous())
    sinks = None if shape.sink_logits is None else shape.sink_logits.float().contiguous()
    n_seq, n_heads, n_columns, _ = q.shape
    out = torch.empty((n_columns, n_seq, n_heads, pages.value_dim), dtype=q.dtype)
    lse = torch.empty((n_columns, n_seq, n_heads), dtype=torch.float32)
    unused, first = torch.zeros_like(lens), (q[:, :, 0], k_new[:, :, 0], v_new[:, :, 0])
    tensors = (*first, pages.bases, flat_indices(table), lens, unused, unused, by_column, sinks)
    numbers = (pool_numbers(pages), rule_numbers(KEEP_ALL), shape.window, shape.scale, shape.softcap, 1.0)
    struct = decode_struct(DecodeValues(*tensors, *numbers), out, lse, unused)
    columns = COLUMNS_OF_TOKENS(n_columns, *(x.stride(2) for x in new))
    run("mp_decode_rows", "the decode kernel", struct + columns)
    return AttendOutput(out.permute(1, 2, 0, 3), lse.permute(1, 2, 0))


def decode_shared(args: SharedDecodeArgs) -> AttendOutput:
    """Run `OpSet.decode_shared`."""
    step = args.step
    shared = [run for run in args.shared if len(run.members) and run.regions.table.numel()]
    if not shared:
        return AttendOutput(*decode(DecodeValues.of(step.q, step.k_new, step.v_new, step.regions))[:2])
    q = readable_rows(step.q)
    values = DecodeValues.of(q, readable_rows(step.k_new), readable_rows(step.v_new), step.regions)
    runs = [(members, r.pages, flat_indices(r.table), flat_indices(r.lens)) for members, r in shared]
    numbers = step.regions.shape.scale, step.regions.shape.softcap
    structs = [_run_struct(q, run, (0, 0, 0), numbers) for run in runs]
    return AttendOutput(*decode(values, N_RUNS(len(structs)) + b"".join(structs), "mp_decode_shared")[:2])


def prefill(args: PrefillArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Run a prefill; the third result is empty where no sums are requested."""
    q, k, v, q_pos = readable_rows(args.q), readable_rows(args.k), readable_rows(args.v), flat_indices(args.q_pos)
    past_pos = None if args.past_pos is None else flat_indices(args.past_pos)
    past_log_masses = None if args.past_log_masses is None else readable_rows(args.past_log_masses.float())
    shape, summed = args.shape, args.colsum is not None
    sink_logits = None if shape.sink_logits is None else shape.sink_logits.float().contiguous()
    n_heads, n_queries, _ = q.shape
    n_kv_heads, n_columns, value_dim = v.shape
    out = torch.empty((n_heads, n_queries, value_dim), dtype=q.dtype)
    lse = torch.empty((n_heads, n_queries), dtype=torch.float32)
    sums = torch.zeros((n_kv_heads, n_columns) if summed else (0, 0), dtype=torch.float32)
    if n_queries:
        past, results = (past_pos, past_log_masses), (out, lse, sums if summed else None)
        shown = (n_columns - n_queries, value_dim, shape.window, int(args.colsum or 0))
        numbers = (shape.scale, shape.softcap, args.decay)
        _call_prefill((q, k, v), q_pos, past, sink_logits, results, shown, False, numbers)
    return out, lse, sums


def _call_prefill(
    rows: tuple[Tensor, Tensor, Tensor | None],
    q_pos: Tensor,
    past: tuple[Tensor | None, Tensor | None],
    sink_logits: Tensor | None,
    results: tuple[Tensor | None, Tensor, Tensor | None],
    shown: tuple[int, int, int, int],
    lse_known: bool,
    numbers: tuple[float, float, float],
) -> None:
    """Call the prefill kernel.

    Args:
        rows: Queries, keys, and values if outputs are wanted.
        q_pos: Positions of the queries.
        past: Positions and log masses of the columns before the queries' own.
        sink_logits: Logit of each head's sink.
        results: Outputs, log-sum-exps and column sums to be written.
        shown: Past columns, numbers of a value, window, and a Reduce.
        lse_known: Whether the log-sum-exps are given.
        numbers: Scale, softcap and decay.
    """
    (q, k, v), (past_columns, value_dim, window, reduce) = rows, shown
    struct = PREFILL(
        *map(address_of, rows),
        *(DTYPES[x.dtype] for x in (q, k, k if v is None else v)),
        *q.stride()[:2],
        *k.stride()[:2],
        *((0, 0) if v is None else v.stride()[:2]),
        q_pos.data_ptr(),
        *shared_rows(past[0]),
        *shared_rows(past[1]),
        address_of(sink_logits),
        *map(address_of, results),
        len(q),
        len(k),
        q.shape[1],
        k.shape[1],
        past_columns,
        q.shape[2],
        value_dim,
        window,
        reduce,
        thread_count(),
        int(lse_known),
        *numbers,
    )
    run("mp_prefill", "the prefill kernel", struct)


def attend(args: AttendArgs) -> AttendOutput:
    """Run `OpSet.attend`; the partial output is updated in place."""
    (pages, table, lens), q = args.regions.parts, readable_rows(args.q)
    members = torch.arange(len(q)) if args.members is None else args.members
    out, lse = empty_output(args.q, pages.value_dim) if args.partial is None else args.partial
    table, lens = flat_indices(table), flat_indices(lens)
    if not len(members) or not table.numel():
        return AttendOutput(out, lse)
    found = (out.data_ptr(), DTYPES[out.dtype], lse.data_ptr())
    struct = _run_struct(q, (members, pages, table, lens), found, (args.scale, args.softcap))
    run("mp_attend", "the attention to shared entries", struct)
    return AttendOutput(out, lse)


def _run_struct(
    q: Tensor, of: tuple[Tensor, PageArrays, Tensor, Tensor], found: tuple[int, int, int], numbers: tuple[float, float]
) -> bytes:
    """Return the C struct of the attention of queries to shared entries; it keeps no tensor.

    Args:
        q: Queries (S, Hq, key_dim).
        of: Sequences that share, pages, table and lens of the entries.
        found: Address and dtype of the output elsewhere, and address of its log-sum-exp; zeros if there is none.
        numbers: Scale and softcap.
    """
    members, pages, table, lens = of
    return ATTEND(
        pages.bases.data_ptr(),
        pages.bases.shape[1],
        *pool_numbers(pages),
        q.data_ptr(),
        DTYPES[q.dtype],
        *q.stride()[:2],
        table.data_ptr(),
        table.stride(0),
        lens.data_ptr(),
        members.data_ptr(),
        *found,
        len(members),
        q.shape[1],
        len(table),
        thread_count(),
        *numbers,
    )


def window_signal(args: WindowSignalArgs) -> Tensor:
    """Sum attention of queries that bring no columns."""
    q, k, q_pos, k_pos = (
        readable_rows(args.q),
        readable_rows(args.k),
        flat_indices(args.q_pos),
        flat_indices(args.k_pos),
    )
    log_masses = None if args.log_masses is None else readable_rows(args.log_masses.float())
    sinks = None if args.shape.sink_logits is None else args.shape.sink_logits.float().contiguous()
    (n_heads, n_queries, _), (n_kv_heads, n_columns, _) = q.shape, k.shape
    sums = torch.zeros((n_kv_heads, n_columns), dtype=torch.float32)
    if n_queries and n_columns:
        known, shape = args.lse is not None, args.shape
        lse = torch.empty((n_heads, n_queries)) if args.lse is None else args.lse.float().contiguous()
        shown = (n_columns, 0, shape.window, int(args.reduce))
        results, numbers = (None, lse, sums), (shape.scale, shape.softcap, 1.0)
        _call_prefill((q, k, None), q_pos, (k_pos, log_masses), sinks, results, shown, known, numbers)
    return sums


def write(bases: Tensor, table: Tensor, rows: EntryRows, pool: list[int]) -> None:
    if rows.index.numel() == 0:
        return
    table, start, count, index = map(flat_indices, (table, rows.start, rows.count, rows.index))
    keys, values, positions = readable_rows(rows.keys), readable_rows(rows.values), rows.positions
    if positions.dtype is not INT32:
        raise OptionError(f"positions are int32, not {positions.dtype}")
    scores = None if rows.scores is None else rows.scores.float()
    log_masses = None if rows.log_masses is None else rows.log_masses.float()
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
            address_of(scores),
            address_of(log_masses),
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
