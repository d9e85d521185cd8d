"""The ops through native kernels, their registration with torch, and the C structs of `admit` and `merge_slots`."""

from __future__ import annotations

from struct import Struct
from typing import Any

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.args import (
    AttentionShape,
    DecodeArgs,
    DecodeOutput,
    EntryRows,
    HeadRuleArgs,
    MergeArgs,
    PaddedEntries,
    PageRegions,
    PrefillArgs,
    PrefillOutput,
)
from millpond.kernels.decode_rules import Reduce
from millpond.kernels.eager.attention import READ_TOGETHER
from millpond.kernels.eager.selection import move_by
from millpond.kernels.native import abi, decoder_rows
from millpond.kernels.native.pages import regions_struct
from millpond.kernels.native.structs import (
    DTYPES,
    INT32,
    TORCH_DTYPES,
    entry_point,
    flat_indices,
    pool_numbers,
    readable_rows,
    run,
)
from millpond.kernels.selection_args import MoveArgs
from millpond.kernels.thread_count import thread_count
from millpond.kernels.window_args import PagedWindowArgs

LIBRARY = torch.library.Library("millpond", "DEF")
LIBRARY.define(
    "decode(Tensor q, Tensor k_new, Tensor v_new, Tensor(a!) bases, Tensor table, Tensor(b!) lens, Tensor caps, "
    "Tensor recent, Tensor q_pos, Tensor? sink_logits, int[] pool, int[] rule, int window, float scale, "
    "float softcap, float decay, Tensor? kept=None, Tensor? least=None) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "prefill(Tensor q, Tensor k, Tensor v, Tensor q_pos, Tensor? past_pos, Tensor? past_log_masses, "
    "Tensor? sink_logits, int window, float scale, float softcap, int colsum, float decay) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "write(Tensor(a!) bases, Tensor table, Tensor start, Tensor count, Tensor index, Tensor keys, Tensor values, "
    "Tensor positions, Tensor? scores, Tensor? log_masses, int[] pool) -> ()"
)
LIBRARY.define(
    "read(Tensor bases, Tensor table, Tensor lens, int width, int[] pool) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
LIBRARY.impl("decode", lambda *values: abi.decode(abi.DecodeValues(*values)), "CPU")
LIBRARY.impl("prefill", lambda *values: abi.prefill(_prefill_args(*values)), "CPU")
LIBRARY.impl("write", lambda bases, table, *rest: abi.write(bases, table, EntryRows(*rest[:-1]), rest[-1]), "CPU")
LIBRARY.impl("read", abi.read, "CPU")
LIBRARY.impl("linear", decoder_rows.linear, "CPU")


def _prefill_args(*values: Any) -> PrefillArgs:
    q, k, v, q_pos, past_pos, past_log_masses, sinks, window, scale, softcap, colsum, decay = values
    shape, reduce = AttentionShape(scale, softcap, window, sinks), None if colsum < 0 else Reduce(colsum)
    return PrefillArgs(q, k, v, q_pos, shape, past_pos, past_log_masses, reduce, decay)


@torch.library.register_fake("millpond::decode", lib=LIBRARY)
def _decode_shapes(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    step = abi.DecodeValues(*values)
    n_seq, n_heads, _ = step.q.shape
    out = step.q.new_empty((n_seq, n_heads, step.pool[3]))
    lse = step.q.new_empty((n_seq, n_heads), dtype=torch.float32)
    return out, lse, step.q.new_empty((n_seq * step.k_new.shape[1],), dtype=torch.int32)


@torch.library.register_fake("millpond::prefill", lib=LIBRARY)
def _prefill_shapes(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, colsum, _ = others
    sums = v.shape[:2] if colsum >= 0 else (0, 0)
    return (
        q.new_empty((*q.shape[:2], v.shape[-1])),
        q.new_empty(q.shape[:2], dtype=torch.float32),
        q.new_empty(sums, dtype=torch.float32),
    )


@torch.library.register_fake("millpond::write", lib=LIBRARY)
def _write_shapes(*_: Any) -> None:
    return None


@torch.library.register_fake("millpond::read", lib=LIBRARY)
def _read_shapes(
    bases: Tensor, table: Tensor, lens: Tensor, width: int, pool: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, dtype = table.shape[0], TORCH_DTYPES[pool[4]]
    keys = bases.new_empty((n, width, pool[2]), dtype=dtype)
    values = bases.new_empty((n, width, pool[3]), dtype=dtype)
    positions = bases.new_empty((n, width), dtype=torch.int32)
    scores = bases.new_empty((n, width), dtype=torch.float32)
    return keys, values, positions, scores, bases.new_empty((n, width) if pool[5] else (0, 0), dtype=torch.float32)


@torch.library.register_fake("millpond::linear", lib=LIBRARY)
def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def decode(args: DecodeArgs) -> DecodeOutput:
    values = abi.DecodeValues.of(args.q, args.k_new, args.v_new, args.regions)
    if args.regions.packed is not None:
        return DecodeOutput(*abi.decode(values, regions_struct(args.regions.packed), "mp_decode_packed"))
    if torch.compiler.is_compiling():
        return DecodeOutput(*torch.ops.millpond.decode.default(*values))
    return DecodeOutput(*abi.decode(values))


def prefill(args: PrefillArgs) -> PrefillOutput:
    shape = args.shape
    if torch.compiler.is_compiling():
        tensors = (args.q, args.k, args.v, args.q_pos, args.past_pos, args.past_log_masses, shape.sink_logits)
        numbers = (
            shape.window,
            shape.scale,
            shape.softcap,
            -1 if args.colsum is None else int(args.colsum),
            args.decay,
        )
        out, lse, sums = torch.ops.millpond.prefill.default(*tensors, *numbers)
    else:
        out, lse, sums = abi.prefill(args)
    return PrefillOutput(out, lse, sums if args.colsum is not None else None)


def write(regions: PageRegions, rows: EntryRows) -> None:
    pages, table = regions.pages, regions.table
    if torch.compiler.is_compiling():
        entries = (rows.keys, rows.values, rows.positions, rows.scores, rows.log_masses)
        where = (pages.bases, table, rows.start, rows.count, rows.index)
        torch.ops.millpond.write.default(*where, *entries, pool_numbers(pages))
    else:
        abi.write(pages.bases, table, rows, pool_numbers(pages))


def read(regions: PageRegions, width: int) -> PaddedEntries:
    call, pages = torch.ops.millpond.read.default if torch.compiler.is_compiling() else abi.read, regions.pages
    padded = PaddedEntries(*call(pages.bases, regions.table, regions.lens, width, pool_numbers(pages)))
    return padded if pages.masses else padded._replace(log_masses=None)


def move_entries(args: MoveArgs) -> None:
    move_by(args, read, write)


def window_sums(args: PagedWindowArgs) -> Tensor:
    sums = [abi.window_signal(part.over(read(part.regions, args.width))) for part in args.parts(READ_TOGETHER)]
    return torch.cat(sums) if sums else args.q.new_zeros(0, args.width, dtype=torch.float32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    call = torch.ops.millpond.linear.default if torch.compiler.is_compiling() else decoder_rows.linear
    result: Tensor = call(x, weight, bias)
    return result


#: the order of fields is that of csrc/common/args.hpp
ADMIT = Struct("=25q").pack


def _numbers(x: Tensor) -> Tensor:
    return x if x.dtype is torch.int64 and x.is_contiguous() else x.to(torch.int64).contiguous()


def admit(args: HeadRuleArgs) -> bool:
    (pages, table, lens), ids = args.regions.parts, args.ids
    if lens.dtype is not INT32 or not lens.is_contiguous():
        raise OptionError("lens is written in place: it must be a contiguous int32 tensor")
    table, local, classes = flat_indices(table), flat_indices(args.local), args.classes.contiguous()
    sequences, kinds, seen, quota, most = map(_numbers, (args.sequences, args.kinds, args.seen, args.quota, args.most))
    entry_point("mp_admit")(
        ADMIT(
            pages.bases.data_ptr(),
            pages.bases.shape[1],
            *pool_numbers(pages),
            table.data_ptr(),
            table.stride(0),
            lens.data_ptr(),
            sequences.data_ptr(),
            ids.data_ptr(),
            ids.stride(0),
            classes.data_ptr(),
            len(classes),
            kinds.data_ptr(),
            local.data_ptr(),
            seen.data_ptr(),
            quota.data_ptr(),
            most.data_ptr(),
            len(sequences),
            len(lens) // len(ids),
            args.sinks,
            args.window,
        )
    )
    return True


#: the order of fields is that of csrc/common/args.hpp
MERGE = Struct("=31q4d").pack
NEAREST = Struct("=17qd").pack
MEAN = Struct("=13q").pack


def merge_slots(args: MergeArgs) -> None:
    (pages, table, lens), memory, leave, rule = args.regions.parts, args.memory, args.leave, args.rule
    table, caps, recent, q_pos = (
        flat_indices(table),
        flat_indices(args.caps),
        flat_indices(args.recent),
        flat_indices(args.q_pos),
    )
    if lens.dtype is not INT32 or not lens.is_contiguous():
        raise OptionError("lens is written in place: it must be a contiguous int32 tensor")
    if memory.dtype is not torch.float64 or not memory.is_contiguous():
        raise OptionError("memory is written in place: it must be a contiguous float64 tensor")
    local = args.local if args.local is None else readable_rows(args.local.float())
    n_seq = q_pos.shape[0]
    struct = MERGE(
        pages.bases.data_ptr(),
        pages.bases.shape[1],
        *pool_numbers(pages),
        table.data_ptr(),
        table.stride(0),
        lens.data_ptr(),
        caps.data_ptr(),
        recent.data_ptr(),
        q_pos.data_ptr(),
        memory.data_ptr(),
        0 if local is None else local.data_ptr(),
        0 if local is None else local.stride(0),
        n_seq,
        lens.shape[0] // n_seq if n_seq else 0,
        leave.evict,
        leave.sinks,
        leave.seed & 0xFFFFFFFF,
        rule.weigh,
        rule.closed,
        rule.targets,
        rule.over,
        rule.average,
        rule.draw,
        rule.bias,
        rule.masses and pages.masses,
        thread_count(),
        rule.threshold,
        rule.rate,
        rule.cover,
        rule.most,
    )
    run("mp_merge_slots", "the merging kernel", struct)


def _flags(mask: Tensor) -> Tensor:
    return mask.contiguous().view(torch.uint8)


def nearest(
    keys: Tensor, values: Tensor | None, sources: Tensor, targets: Tensor, floor: float
) -> tuple[Tensor, Tensor]:
    keys, sources, targets = readable_rows(keys), _flags(sources), _flags(targets)
    values = None if values is None else readable_rows(values)
    into = torch.empty(sources.shape, dtype=torch.int64)
    alike = torch.empty(sources.shape, dtype=torch.float64)
    of_values = (0, DTYPES[keys.dtype], *keys.stride()[:2], *keys.stride()[:2], 0)
    if values is not None:
        of_values = (values.data_ptr(), DTYPES[values.dtype], *keys.stride()[:2], *values.stride()[:2], values.shape[2])
    address, dtype, *strides, value_dim = of_values
    struct = NEAREST(
        keys.data_ptr(),
        address,
        DTYPES[keys.dtype],
        dtype,
        *strides,
        sources.data_ptr(),
        targets.data_ptr(),
        into.data_ptr(),
        alike.data_ptr(),
        *keys.shape[:2],
        keys.shape[2],
        value_dim,
        thread_count(),
        floor,
    )
    run("mp_nearest", "the likeness kernel", struct)
    return into, alike


def mean_rows(x: Tensor, weight: Tensor, own: Tensor, into: Tensor, leaves: Tensor) -> Tensor:
    x, into, leaves = readable_rows(x), into.contiguous(), _flags(leaves)
    weight, own = weight.double().contiguous(), own.double().contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    struct = MEAN(
        x.data_ptr(),
        DTYPES[x.dtype],
        *x.stride()[:2],
        weight.data_ptr(),
        own.data_ptr(),
        into.data_ptr(),
        leaves.data_ptr(),
        out.data_ptr(),
        *x.shape,
        thread_count(),
    )
    run("mp_mean_rows", "the merging kernel", struct)
    return out


#: the order of fields is that of csrc/common/args.hpp
RACE = Struct("=9q").pack


def race(weights: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return the columns (R,) drawn by weights (R, C) float32.

    keys (R,) and ids (R, C) int64, all with contiguous rows.
    """
    keys = keys.contiguous()
    drawn = torch.empty(len(weights), dtype=torch.int64)
    entry_point("mp_race")(
        RACE(
            weights.data_ptr(),
            0 if ids is None else ids.data_ptr(),
            keys.data_ptr(),
            drawn.data_ptr(),
            *weights.shape,
            weights.stride(0),
            0 if ids is None else ids.stride(0),
            thread_count(),
        )
    )
    return drawn


SCAN = Struct("=21qd").pack
#: Columns that `mp_newest_alike` reads together.
COLUMNS = 128


def _scan_struct(x: Tensor, y: Tensor, sets: int, results: tuple[int, ...], threshold: float = 0.0) -> bytes:
    """Return the C struct of products of rows x (H, N, dim) and y (H * sets, n, dim)."""
    rows = (x.data_ptr(), y.data_ptr(), DTYPES[x.dtype], DTYPES[y.dtype], *x.stride()[:2], *y.stride()[:2])
    return SCAN(*rows, *x.shape[:2], sets, y.shape[1], x.shape[2], *results, thread_count(), threshold)


def absolute_sums(x: Tensor, y: Tensor) -> Tensor:
    """Return (H, N) for x (H, N, dim) and y (H * sets, n, dim)."""
    x, y = readable_rows(x), readable_rows(y)
    n_heads, n_rows, _ = x.shape
    sums = torch.zeros((n_heads, n_rows), dtype=torch.float32)
    if x.numel() and y.numel():
        results = (sums.data_ptr(), 0, 0, 0, 0, 0, 0)
        run("mp_absolute_sums", "the products", _scan_struct(x, y, len(y) // n_heads, results))
    return sums


def newest_alike(keys: Tensor, lens: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor]:
    """Return (H, N, most) int32 and float32 for keys (H, N, dim) and lens (H,)."""
    keys, lens = readable_rows(keys), flat_indices(lens).contiguous()
    n_heads, n_rows, _ = keys.shape
    at = torch.full((n_heads, n_rows, most), -1, dtype=INT32)
    cosines = torch.zeros((n_heads, n_rows, most), dtype=torch.float32)
    if keys.numel() and most:
        scales = torch.zeros((n_heads, -(-n_rows // COLUMNS) * COLUMNS), dtype=torch.float32)
        lengths = torch.linalg.vector_norm(keys.float(), dim=-1)
        torch.reciprocal(lengths.clamp_(min=1e-12), out=scales[:, :n_rows])
        to = (lens.data_ptr(), at.data_ptr(), cosines.data_ptr(), most)
        struct = _scan_struct(keys, keys, 1, (0, scales.data_ptr(), scales.stride(0), *to), threshold)
        run("mp_newest_alike", "the products", struct)
    return at, cosines
