"""Attention over codes on a CUDA GPU: the sections `codes` and `code-speed` of gpu_check.py.

Every format is checked against the reference on the CPU, and timed against bfloat16 pages over equal entries.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from gpu_machine import CODE_TOLERANCE, Machine
from gpu_rows import Row
from torch import Tensor

from millpond.codec import codec_named
from millpond.codec.spec import Tables
from millpond.kernels import gpu, reference
from millpond.kernels.args import AttentionShape, DecodeArgs, EntryRows, PageRegions, StepRegions
from millpond.kernels.decode_rules import KEEP_ALL, UNBOUNDED, DecodeRule, Evict, Reduce, Signal
from millpond.kernels.packed.layout import PackedArrays
from millpond.kernels.packed.regions import PackedRegions, Rope
from millpond.kernels.pages import PageArrays

DECODE: Any = importlib.import_module("millpond.kernels.gpu.decode")  # the package shows the function under this name
WORDS: Any = importlib.import_module("millpond.kernels.gpu.packed_words")

Pages = TypeVar("Pages", PageArrays, PackedArrays)

CODECS = (
    "int8",
    "int4",
    "int3",
    "int2",
    "kivi4",
    "kivi2",
    "flexgen4",
    "fp8",
    "rotated4",
    "mikv",
    "kvquant4",
    "kvquant2",
)
RULES = (
    KEEP_ALL,
    DecodeRule(Signal.SUM, Reduce.MEAN, Evict.ACC, sinks=4),
    DecodeRule(Signal.LAST, Reduce.MAX, Evict.OLDEST),
)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}
PLAIN_SLOTS, PLAIN = 64, 40  # of the pages of newest entries; how many lie there
CPU = torch.device("cpu")
PLAIN_PAGES = "bf16 pages"
#: What `write_packed` writes of a page.
WRITTEN = ("codes", "positions", "scores")
#: Slots per split, then slots per step, warps and stages of `attend_words`.
TUNINGS = ((256, 64, 2, 3), (256, 64, 2, 2), (512, 64, 2, 3), (512, 64, 2, 2), (1024, 64, 2, 2))


def int32(*shape: int, value: int = 0, device: torch.device = CPU) -> Tensor:
    return torch.full(shape, value, dtype=torch.int32, device=device)


def turned(keys: Tensor, positions: Tensor) -> Tensor:
    """Keys (1, 1, n, D) turned as Llama does."""
    half = keys.shape[-1] // 2
    angles = positions[0, :, None] * 10_000.0 ** (-torch.arange(half) / half)
    a, b = keys.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def before_rope(heads: int, dim: int, positions: int, bits: int) -> tuple[Tables, dict[str, Any]]:
    """Even tables for KVQuant, and what regions know: ranges that random keys fit, and a rotation."""
    numbers = tuple(torch.linspace(-1, 1, 1 << bits).bfloat16().float().tolist())
    scales, rope = torch.full((heads, dim), 3.0), Rope.of(turned, dim, positions)
    return Tables(numbers, numbers), {"key_scales": scales, "key_zeros": torch.zeros(heads, dim), "rope": rope}


def sealed(codec: str, regions: int, stored: int, dim: int, heads: int) -> PackedRegions:
    """Packed pages of random entries on the CPU; the first page of a region is encoded, the others repeat it.

    Keys before RoPE are those of their own positions in the first page only: elsewhere other keys, as random.
    """
    format = codec_named(codec)
    tables, known = None, {}
    if format.calibrated:
        tables, known = before_rope(heads, dim, 2 * stored, format.key.format.bits)
        format = replace(format, key_outliers=0.01, value_outliers=0.01)
    layout = format.layout(dim, dim, tables=tables)
    per_region = stored // layout.slots
    pages = PackedArrays(1 << (regions * per_region - 1).bit_length(), layout, CPU)
    pages.add_arena(regions * per_region)
    table = torch.randperm(regions * per_region).view(regions, per_region).int()
    found = PackedRegions(pages, table, int32(regions, value=layout.slots), int32(regions), **known)
    keys, values = torch.randn(2, regions, layout.slots, dim)
    index = torch.arange(layout.slots, dtype=torch.int32).expand(regions, -1).contiguous()
    reference.write_packed(found, EntryRows(int32(regions), found.lens, index, keys, values, index))
    pages.codes[0][table.long()] = pages.codes[0][table[:, :1].long()].expand(-1, per_region, -1).clone()
    places = torch.arange(per_region * layout.slots).view(per_region, layout.slots)
    pages.positions[0][table.long()] = places.int().expand(regions, -1, -1)
    # accumulators so far apart that rounding decides nothing
    pages.scores[0][table.long()] = (places.flip(0) * 0.37).expand(regions, -1, -1)
    return replace(found, lens=int32(regions, value=per_region * layout.slots))


def plain(regions: int, dim: int, dtype: torch.dtype, held: int, first: int) -> tuple[PageArrays, Tensor]:
    """Plain pages of `held` entries at positions from `first` on, with room for more, on the CPU, and their table."""
    per_region = held // PLAIN_SLOTS + 1
    pages = PageArrays(1 << (regions * per_region - 1).bit_length(), PLAIN_SLOTS, dim, dim, dtype, CPU)
    pages.add_arena(regions * per_region)
    table = torch.arange(regions * per_region, dtype=torch.int32).view(regions, per_region)
    for arena in (pages.keys[0], pages.values[0]):
        arena.normal_()
    places = torch.arange(per_region * PLAIN_SLOTS).view(per_region, PLAIN_SLOTS).repeat(regions, 1)
    pages.positions[0][:] = places + first
    pages.scores[0][:] = 1000 + places * 0.41
    return pages, table


def moved(pages: Pages, device: torch.device) -> Pages:
    """A copy of pages on a device."""
    other = copy.copy(pages)
    other.device = device
    for name in ("keys", "values", "codes", "positions", "scores", "log_masses"):
        if hasattr(pages, name):
            setattr(other, name, [t.clone().to(device) for t in getattr(pages, name)])
    other.refresh()
    return other


def regions_on(found: PackedRegions, device: torch.device) -> PackedRegions:
    """A copy of packed regions on a device."""
    table, lens, dead = (t.clone().to(device) for t in (found.table, found.lens, found.dead))
    scales, zeros = (None if t is None else t.to(device) for t in (found.key_scales, found.key_zeros))
    rope = found.rope and Rope(*(getattr(found.rope, each.name).to(device) for each in fields(found.rope)))
    return replace(
        found,
        pages=moved(found.pages, device),
        table=table,
        lens=lens,
        dead=dead,
        key_scales=scales,
        key_zeros=zeros,
        rope=rope,
    )


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest number of `want`."""
    got, want = got.cpu().double(), want.double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-3))


def checked(machine: Machine, codec: str) -> Iterator[Row]:
    """One decode call per dtype, shape and rule, here by the reference and there by the kernels."""
    shapes = [(2, 64)] if machine.tiny else [(4, 64), (4, 128), (1, 256)]  # heads of a group, dim
    dtypes = (torch.bfloat16,) if machine.tiny else (torch.bfloat16, torch.float32)
    for dtype, (group, dim), rule in itertools.product(dtypes, shapes, RULES):
        if not machine.mine():
            continue
        torch.manual_seed(0)
        n_seq, heads, stored = 2, 2, 128 if machine.tiny else 640
        regions = n_seq * heads
        codes, (pages, table) = sealed(codec, regions, stored, dim, heads), plain(regions, dim, dtype, PLAIN, stored)
        lens, caps = int32(regions, value=PLAIN), int32(regions, value=stored + PLAIN)
        q = torch.randn(n_seq, heads * group, dim).to(dtype)
        new = torch.randn(n_seq, heads, dim).to(dtype)
        places = codes, pages, table, lens, caps, int32(regions, value=9), int32(n_seq, value=stored + PLAIN)
        device = machine.device
        there = (regions_on(codes, device), moved(pages, device), *(t.clone().to(device) for t in places[2:]))
        found = []
        for impl, on, (c, *where, caps, recent, q_pos) in ((reference, CPU, places), (gpu, device, there)):
            plain_part, shape = PageRegions(*where), AttentionShape(dim**-0.5)
            given = [t.to(on) for t in (q, new, new)]
            found.append(impl.decode(DecodeArgs(*given, StepRegions(plain_part, caps, recent, q_pos, rule, shape, c))))
        (out, lse, gone), (out2, lse2, gone2) = found
        ours, held = there[0], codes.pages.positions[0] >= 0
        yield {
            "op": "codes",
            "codec": codec,
            "dtype": str(dtype),
            "dim": dim,
            "rule": rule.evict.name,
            "out": error(out2, out),
            "lse": error(lse2, lse),
            "scores": error(ours.pages.scores[0].cpu()[held], codes.pages.scores[0][held]),
            "exact": torch.equal(gone2.cpu(), gone)
            and torch.equal(ours.dead.cpu(), codes.dead)
            and torch.equal(ours.pages.positions[0].cpu(), codes.pages.positions[0])
            and torch.equal(there[3].cpu(), lens),
            "limit": TOLERANCE[dtype],
            "sharp_limit": CODE_TOLERANCE[dtype],
        }


def to_encode(codes: PackedRegions, dim: int, dtype: torch.dtype) -> EntryRows:
    """Random entries that fill all pages of regions on the CPU."""
    n, stored = len(codes.lens), int(codes.lens[0])
    keys, values = torch.randn(2, n, stored, dim).to(dtype)
    index = torch.arange(stored, dtype=torch.int32).expand(n, -1).contiguous()
    start, count = int32(n), int32(n, value=stored)
    rows = EntryRows(start, count, index, keys, values, index, torch.rand(n, stored))
    return replace(rows, on_host=(start.numpy(), count.numpy()))


def rows_on(rows: EntryRows, device: torch.device) -> EntryRows:
    """A copy of entries on a device."""
    tensors = {each.name: getattr(rows, each.name) for each in fields(rows)}
    return replace(rows, **{name: t.to(device) for name, t in tensors.items() if isinstance(t, Tensor)})


def encoded(machine: Machine, codec: str) -> Iterator[Row]:
    """Pages of random entries, written here by the reference and there by the kernel: the same bytes."""
    for dtype, dim in itertools.product((torch.bfloat16, torch.float32), (64,) if machine.tiny else (64, 128, 256)):
        if not machine.mine():
            continue
        torch.manual_seed(1)
        codes = sealed(codec, 4, 128 if machine.tiny else 640, dim, 2)
        there = regions_on(codes, machine.device)
        rows = to_encode(codes, dim, dtype)
        reference.write_packed(codes, rows)
        gpu.write_packed(there, rows_on(rows, machine.device))
        pairs = ((getattr(codes.pages, name)[0], getattr(there.pages, name)[0].cpu()) for name in WRITTEN)
        yield {
            "op": "encode",
            "codec": codec,
            "dtype": str(dtype),
            "dim": dim,
            "rule": "",
            "out": 0.0,
            "lse": 0.0,
            "scores": 0.0,
            "exact": all(torch.equal(here, found) for here, found in pairs),
            "limit": 0.0,
            "sharp_limit": 0.0,
        }


def check(machine: Machine) -> list[Row]:
    """Every format, judged."""
    rows = []
    for codec in CODECS:
        same = [*checked(machine, codec), *encoded(machine, codec)]
        rows += same
        for row in same:
            sharp = max(row["lse"], row["scores"]) <= row["sharp_limit"]
            row["ok"] = bool(row["exact"] and sharp and row["out"] <= row["limit"])
            if not row["ok"]:
                print("MISMATCH", row, flush=True)
        worst = ", ".join(f"{name} {max((r[name] for r in same), default=0):.1e}" for name in ("out", "lse", "scores"))
        print(f"codes {codec:9} {sum(r['ok'] for r in same)}/{len(same)} ok, max error {worst}", flush=True)
    return rows


@contextmanager
def tuned(split: int, *words: int) -> Iterator[None]:
    """Other sizes of `attend_words`, and of splits, for a while."""
    usual = DECODE.TUNING, WORDS.TUNING
    DECODE.TUNING, WORDS.TUNING = usual[0]._replace(split=split), WORDS.Tuning(*words)
    try:
        yield
    finally:
        DECODE.TUNING, WORDS.TUNING = usual


@lru_cache(maxsize=1)
def timed_regions(machine: Machine, codec: str, regions: int, stored: int, dim: int, heads: int) -> PackedRegions:
    """`sealed` on the device, once for several timings."""
    return regions_on(sealed(codec, regions, stored, dim, heads), machine.device)


def time_codec(machine: Machine, codec: str) -> Row:
    """A decoding step of one layer over codes: 32 query heads over 8 KV heads of width 128, 16 sequences."""
    n_seq, heads, group, dim, stored = (1, 1, 4, 64, 128) if machine.tiny else (16, 8, 4, 128, 8192)
    regions, device = n_seq * heads, machine.device
    q = torch.randn(n_seq, heads * group, dim, device=device).bfloat16()
    new = torch.randn(n_seq, heads, dim, device=device).bfloat16()
    caps, recent = int32(regions, value=UNBOUNDED, device=device), int32(regions, device=device)
    q_pos = int32(n_seq, value=2 * stored, device=device)
    held = stored if codec == PLAIN_PAGES else PLAIN
    made, table = plain(regions, dim, torch.bfloat16, held, stored)
    pages, table, lens = moved(made, device), table.to(device), int32(regions, value=held, device=device)
    codes = None if held == stored else timed_regions(machine, codec, regions, stored, dim, heads)

    def step() -> object:
        where, shape = PageRegions(pages, table, lens), AttentionShape(dim**-0.5)
        return gpu.decode(DecodeArgs(q, new, new, StepRegions(where, caps, recent, q_pos, KEEP_ALL, shape, codes)))

    row = {"codec": codec, "stored": stored, "batch": n_seq}
    row["ms"] = machine.ms(machine.graphed(step), lambda: lens.fill_(held))
    if codes is not None:
        entries = rows_on(to_encode(codes, dim, torch.bfloat16), device)
        row["encode_ms"] = machine.ms(lambda: gpu.write_packed(codes, entries))
    return row


def time_tuning(machine: Machine, codec: str, tuning: tuple[int, int, int, int]) -> Row:
    """What `time_codec` times, with other sizes; the kernel that reads codes one by one knows none of them."""
    with tuned(*tuning):
        return {**time_codec(machine, codec), **dict(zip(("split", "block", "warps", "stages"), tuning, strict=True))}


def run_codes(machine: Machine) -> list[Row]:
    """Check every format."""
    return check(machine)


def run_code_speed(machine: Machine) -> list[Row]:
    """Time every format, and pages of bfloat16."""
    rows: list[Row] = []
    for codec in (PLAIN_PAGES, *CODECS):
        row = time_codec(machine, codec)
        row["faster"] = rows[0]["ms"] / row["ms"] if rows else 1.0
        rows.append(row)
        print(f"codes {codec:10} {row['ms']:8.3f} ms, {row['faster']:.2f} x bf16", flush=True)
    return rows
