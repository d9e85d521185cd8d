"""One decoding step of one layer in a few small kernels, with fixed shapes and no host synchronization.

    attend   per (region, split): attention of a whole group over SPLIT slots; logits to scratch if a rule needs them;
             over codes that are read as words and plain pages in one launch
    combine  per (sequence, query head): the splits, the new entry and the sink become output and log-sum-exp; where
             the rule keeps all and scores nothing, it appends the new entry, and nothing follows
    score    per (region, chunk), if tables are wide: the accumulator, and the lowest value of the chunk
    settle   per region: what `score` did not do, the victim, the store of the new entry, the length

Where queries and keys come before RoPE, `attend` rotates them, for the kernels behind it too.

Grids follow the width of the table, not the lengths, which only the device knows: programs past a length return at
once, so a CUDA graph holds the step. Splits have a fixed size and are combined in order, so an output depends neither
on the batch nor on the run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.kernels.args import AttendOutput, DecodeArgs, DecodeOutput, DecodeRowsArgs, SharedDecodeArgs
from millpond.kernels.decode_rules import Evict, Signal
from millpond.kernels.decoder_ops import turned
from millpond.kernels.eager.attention import attend_shared
from millpond.kernels.eager.decode import decode_packed as eager
from millpond.kernels.eager.decode import one_by_one
from millpond.kernels.gpu.attend import attend, combine
from millpond.kernels.gpu.common import TYPES, block_of, check, dot_type, on_its_device, page_logs, rows_of
from millpond.kernels.gpu.new_entry import Turn
from millpond.kernels.gpu.packed import PlainPart, attend_codes
from millpond.kernels.gpu.packed_words import words_serve
from millpond.kernels.gpu.score import score
from millpond.kernels.gpu.settle import settle
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.pages import PageArrays

#: Most slots of plain pages that a program of two warps reads at once.
BESIDE_BLOCK = 32
HASH_SEED = 0xC2B2AE3D  #: factor of the seed in `victims.hash_priority`


class Tuning(NamedTuple):
    """Sizes that change speed and not meaning (SPLIT also changes the order of rounding)."""

    split: int = 256  #: slots per program of `attend`, a multiple of block
    block: int = 64  #: slots per step inside it
    warps: int = 4
    stages: int = 3
    chunk: int = 512  #: slots per program of `score`, and of a step of `settle`
    whole: int = 4096  #: most slots of a region's tables of which `settle` does what `score` would


TUNING = Tuning()


class Part(NamedTuple):
    """Pages of one kind that regions hold, and their share of the scratch memory."""

    where: tuple[Any, ...]  #: bases, for how many arenas they have room, table and its stride
    n_arenas: int  #: that there are
    lens: Tensor  #: (R,) slots in use
    others: Tensor  #: (R,) slots in use of the other part
    logs: dict[str, int]
    first_split: int
    n_splits: int

    @property
    def chunks(self) -> int:
        """Programs of `score` per region; none if there are no pages."""
        return triton.cdiv(self.n_splits * TUNING.split, TUNING.chunk) if self.n_arenas else 0


def _parts(pages: PageArrays, table: Tensor, lens: Tensor, packed: PackedRegions | None) -> tuple[Part, ...]:
    """Return the plain part, and the packed one if there is one, without waiting."""
    n_splits = triton.cdiv(table.shape[1] * pages.slots, TUNING.split)
    where = (pages.bases, pages.bases.shape[1], table, table.stride(0))
    plain = Part(where, pages.n_arenas, lens, lens, page_logs(pages), 0, n_splits)
    if packed is None:
        return (plain,)
    theirs, ids = packed.pages, rows_of(packed.table)
    assert packed.dead.stride() == (1,), "dead is written in place"
    codes = Part(
        (theirs.bases, theirs.bases.shape[1], ids, ids.stride(0)),
        theirs.n_arenas,
        packed.lens.contiguous(),
        lens,
        page_logs(theirs),
        n_splits,
        triton.cdiv(ids.shape[1] * theirs.slots, TUNING.split),
    )
    return plain._replace(others=codes.lens), codes


def plain_constants(pages: PageArrays, block: int) -> dict[str, int]:
    """Return what `attend_both` knows about plain pages that it reads `block` slots at a time."""
    logs = {f"PLAIN_{name}": value for name, value in page_logs(pages).items()}
    dims = {"PLAIN_KEY_DIM": pages.key_dim, "PLAIN_KEY_BLOCK": block_of(pages.key_dim)}
    return {**dims, **logs, "PLAIN_BLOCK": block, "PLAIN_MASSES": int(pages.masses)}


def _lowest(n_regions: int, n_chunks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for value, position and slot of the lowest entries, (R, n_chunks) each."""
    value = torch.empty(n_regions, n_chunks, dtype=torch.float32, device=device)
    position, slot = torch.empty(2, n_regions, n_chunks, dtype=torch.int32, device=device)
    return value, position, slot


@on_its_device
def decode(args: DecodeArgs) -> DecodeOutput:
    """Decode over one or two parts: one softmax, one victim.

    Spans of which some entries stay run in plain torch.
    """
    if args.regions.kept is not None or args.regions.least is not None:
        return eager(turned(args))
    turn = Turn.of(args)
    if turn is None:
        args = turned(args)
        turn = Turn.of(args)
        assert turn is not None, "nothing is left to rotate"
    q, k_new, v_new, regions = args.q, args.k_new, args.v_new, args.regions
    (pages, table, lens), packed, rule = regions.plain.parts, regions.packed, regions.rule
    caps, recent, q_pos, shape = regions.caps, regions.recent, regions.q_pos, regions.shape
    check(q.device, q.dtype, pages.dtype)
    assert lens.stride() == (1,), "lens is written in place"
    n_seq, n_heads, _ = q.shape
    n_kv_heads = k_new.shape[1]
    n_regions, group = n_seq * n_kv_heads, n_heads // n_kv_heads
    signals, chooses = rule.signal is not Signal.NONE, rule.evict is not Evict.NEVER

    def scratch(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=q.device)

    out = torch.empty(n_seq, n_heads, pages.value_dim, dtype=q.dtype, device=q.device)
    lse = scratch(n_seq, n_heads)
    evicted = torch.empty(n_regions, dtype=torch.int32, device=q.device)
    if n_regions == 0:
        return DecodeOutput(out, lse, evicted)

    # rounded to the storage dtype, as they will be read later
    q, k_new, v_new = rows_of(q), rows_of(k_new.to(pages.dtype)), rows_of(v_new.to(pages.dtype))
    table, caps, recent, q_pos = rows_of(table), caps.contiguous(), recent.contiguous(), q_pos.contiguous()
    parts = _parts(pages, table, lens, packed)
    plain, codes = parts[0], parts[-1]
    n_splits = codes.first_split + codes.n_splits
    width = n_splits * TUNING.split
    logits = scratch(n_regions, group, width) if signals else lse
    new_logits = scratch(n_seq, n_heads)
    rows = (n_regions, n_splits, group)
    partial = scratch(*rows, pages.value_dim), scratch(*rows), scratch(*rows)
    dims = {
        "KEY_DIM": pages.key_dim,
        "VALUE_DIM": pages.value_dim,
        "KEY_BLOCK": block_of(pages.key_dim),
        "VALUE_BLOCK": block_of(pages.value_dim),
    }
    heads = {"HEADS": n_kv_heads, "GROUP": group}
    stored = {"TYPE": TYPES[pages.dtype], **plain.logs}
    cap = {"HAS_CAP": shape.softcap != 0.0}
    dot = dot_type(q.dtype, pages.dtype)
    # wide heads take more shared memory, float32 products more registers
    shrink = max(1, block_of(max(pages.key_dim, pages.value_dim)) // 128) * (4 if dot == tl.float32 else 1)
    block = max(16, TUNING.block // shrink)
    shapes = {
        **dims,
        **heads,
        **cap,
        "SPLIT": TUNING.split,
        "GROUP_BLOCK": block_of(group),
        "HAS_WINDOW": shape.window > 0,
        "KEEP_LOGITS": signals,
    }
    has_plain, has_codes = plain.n_splits and pages.n_arenas, packed and codes.n_splits and codes.n_arenas
    seen = torch.empty_like(lens) if has_plain else lens
    appends = has_plain and not signals and not chooses
    beside = None
    if has_plain and has_codes and packed is not None and words_serve(packed, group, dot):
        constants = {"TYPE": TYPES[pages.dtype], **plain_constants(pages, min(block, BESIDE_BLOCK))}
        beside = PlainPart((*plain.where, lens, seen), plain.n_splits, constants)
    if has_plain and beside is None:
        q_turned, k_turned = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k_new))
        attend[(n_regions, plain.n_splits)](
            q,
            *q.stride()[:2],
            k_new,
            *k_new.stride()[:2],
            *turn.where,
            q_turned,
            k_turned,
            *plain.where,
            lens,
            q_pos,
            *partial,
            logits,
            n_splits,
            seen,
            float(shape.scale),
            float(shape.softcap),
            shape.window,
            DOT=dot,
            BLOCK=block,
            HAS_MASSES=pages.masses,
            num_warps=TUNING.warps,
            num_stages=TUNING.stages if shrink == 1 else 2,
            **shapes,
            **stored,
            **turn.constants,
        )
        if args.angles is not None:
            q, k_new = q_turned, k_turned
    if has_codes and packed is not None:
        attend_codes(
            packed,
            q,
            codes.where,
            q_pos,
            (*partial, logits, n_splits, codes.first_split),
            (float(shape.scale), float(shape.softcap), shape.window),
            shapes,
            dot,
            (n_regions, codes.n_splits),
            beside,
        )
    entry = (k_new, *k_new.stride()[:2], v_new, *v_new.stride()[:2])
    combine[(n_regions, group)](
        q,
        *q.stride()[:2],
        *entry,
        seen,
        codes.lens,
        q_pos,
        *partial,
        n_splits,
        codes.first_split,
        shape.sink_logits.float().contiguous() if shape.sink_logits is not None else lse,
        out,
        lse,
        new_logits,
        float(shape.scale),
        float(shape.softcap),
        *plain.where,
        lens,
        evicted,
        SPLIT=TUNING.split,
        HAS_SINK=shape.sink_logits is not None,
        HAS_MASSES=pages.masses,
        PACKED=packed is not None,
        APPENDS=bool(appends),
        **dims,
        **heads,
        **cap,
        **stored,
    )
    if appends:
        return DecodeOutput(out, lse, evicted)

    n_chunks = sum(part.chunks for part in parts)
    shared = rule.shared and rule.evict.by_score and n_kv_heads > 1
    seed = rule.seed * HASH_SEED & 0xFFFFFFFF
    choice = (rule.sinks, shape.window, seed - (1 << 32) if seed >> 31 else seed)
    flags = {
        "SIGNAL": int(rule.signal),
        "REDUCE": int(rule.reduce),
        "EVICT": int(rule.evict),
        "SHARED": shared,
        "HASH_HEADS": 1 if rule.shared else n_kv_heads,
        "WIDTH": rule.spacing.width,
        "SHIFT": rule.spacing.shift,
        "STRIDE": rule.spacing.stride,
    }
    # values that heads share are read from the accumulators of all of them
    whole = not shared and n_chunks > 0 and width <= TUNING.whole
    lowest = _lowest(n_regions, 0 if whole else n_chunks, q.device)
    # so they are all updated first
    passes = [(signals, False), (False, chooses)] if shared and signals else [(signals, chooses)]
    for update, choose in () if whole else passes:
        for part, first in zip(parts, (0, plain.chunks), strict=False):
            if (update or choose) and part.chunks:
                score[(n_regions, part.chunks)](
                    *part.where,
                    part.lens,
                    part.others,
                    caps,
                    recent,
                    q_pos,
                    logits[..., part.first_split * TUNING.split :] if signals else logits,
                    width,
                    lse,
                    *(x[:, first:] for x in lowest),
                    n_chunks,
                    float(rule.decay),
                    *choice,
                    CHUNK=TUNING.chunk,
                    UPDATE=update,
                    CHOOSE=choose,
                    HAS_WINDOW=shape.window > 0,
                    PACKED=packed is not None,
                    **heads,
                    **flags,
                    **part.logs,
                )
    settle[(n_regions,)](
        *plain.where,
        lens,
        caps,
        recent,
        q_pos,
        *entry,
        new_logits,
        lse,
        *lowest,
        n_chunks,
        evicted,
        *choice,
        *codes.where,
        codes.lens,
        packed.dead if packed else lens,
        plain.chunks,
        logits,
        width,
        codes.first_split * TUNING.split,
        float(rule.decay),
        CHUNK=TUNING.chunk * (2 if whole else 1),
        GROUP_BLOCK=block_of(group),
        HAS_WINDOW=shape.window > 0,
        HAS_MASSES=pages.masses,
        PACKED=packed is not None,
        PACKED_LOG_SLOTS=codes.logs["LOG_SLOTS"],
        PACKED_LOG_PAGES=codes.logs["LOG_PAGES"],
        WHOLE=whole,
        num_warps=8 if whole else 4,
        **dims,
        **heads,
        **stored,
        **flags,
    )
    return DecodeOutput(out, lse, evicted)


def decode_shared(args: SharedDecodeArgs) -> AttendOutput:
    """Run a step over own entries, and products of torch for each shared run."""
    return attend_shared(args, decode(args.step))


def decode_rows(args: DecodeRowsArgs) -> AttendOutput:
    """Run a step for each column: a GPU reads many rows fast enough in `prefill`."""
    return one_by_one(args, decode)
