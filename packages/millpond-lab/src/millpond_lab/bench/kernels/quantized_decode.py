"""Speed of decode attention over codes, compared with bfloat16 over equal entries.

Several layers are decoded in turn, as a model does, so that what a call reads does not come from the cache of the
last one. Run it: python -m millpond_lab.bench.kernels.quantized_decode [rounds]
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from millpond.cache.pages.pool import DEFAULT_SLOTS
from millpond.codec import Codec, codec_named
from millpond.codec.spec import Tables
from millpond.kernels import native
from millpond.kernels.args import AttentionShape, DecodeArgs, EntryRows, PageRegions, PrefillArgs, StepRegions
from millpond.kernels.decode_rules import KEEP_ALL, UNBOUNDED
from millpond.kernels.packed.layout import PackedArrays
from millpond.kernels.packed.regions import PackedRegions, Rope
from millpond.kernels.pages import PageArrays
from millpond_lab.bench.kernels.attention import KernelRow

#: Entries per second over those of bf16 that a codec must reach at least.
TARGETS = {"int8": 1.2, "int4": 1.6, "int2": 1.6, "kivi4": 1.6, "kivi2": 1.6, "rotated4": 1.6, "fp8": 1.0}
#: Bytes of bfloat16 that the layers hold together: more than a last level cache.
BEYOND_CACHES = 96 * 2**20
DISTINCT = 512  #: entries that are encoded; pages repeat them
CPU = torch.device("cpu")


@dataclass(frozen=True)
class AttentionCase:
    """The shape of one layer's decode attention."""

    dim: int
    n_kv_heads: int
    group: int
    batch: int
    length: int = 4096

    @property
    def n_regions(self) -> int:
        """Sequences x KV heads."""
        return self.batch * self.n_kv_heads

    @property
    def bf16_bytes(self) -> int:
        """Bytes of the keys and values of one layer in bfloat16."""
        return self.n_regions * self.length * self.dim * 4

    @property
    def n_layers(self) -> int:
        """Layers that are decoded in turn."""
        return max(1, ceil(BEYOND_CACHES / self.bf16_bytes))

    def __str__(self) -> str:
        heads = f"GQA {self.group}:1" if self.group > 1 else "MHA"
        return f"D={self.dim} {heads} {self.batch} x {self.length}"


SHAPES = [
    AttentionCase(dim, n_kv_heads, group, batch)
    for dim in (64, 128)
    for n_kv_heads, group in ((4, 4), (8, 1))
    for batch in (1, 8)
]


def _int32(*shape: int, value: int = 0) -> Tensor:
    return torch.full(shape, value, dtype=torch.int32)


def _plain(shape: AttentionCase, lens: int, slots: int) -> tuple[PageArrays, Tensor]:
    """Pages for `lens` entries of each region and the new ones, those of a region side by side, and their table."""
    per_region = lens // slots + 1
    n = shape.n_regions * per_region
    pages = PageArrays(1 << (n - 1).bit_length(), slots, shape.dim, shape.dim, torch.bfloat16, CPU)
    pages.add_arena(n)
    for arena in (pages.keys[0], pages.values[0]):
        arena[:] = torch.randn(slots, shape.dim)
    pages.positions[0][:] = torch.arange(slots)
    return pages, torch.arange(n, dtype=torch.int32).view(shape.n_regions, per_region)


def _packed(shape: AttentionCase, codec: str) -> PackedRegions:
    """Encoded regions of `length` entries."""
    found = codec_named(codec)
    layout = found.layout(shape.dim, shape.dim, tables=_even_tables(found))
    per_region, distinct = shape.length // layout.slots, DISTINCT // layout.slots
    n = shape.n_regions * per_region
    pages = PackedArrays(1 << (n - 1).bit_length(), layout, CPU)
    pages.add_arena(n)
    table = torch.arange(n, dtype=torch.int32).view(shape.n_regions, per_region)
    regions = PackedRegions(pages, table, _int32(shape.n_regions, value=shape.length), _int32(shape.n_regions))
    if found.calibrated:
        channels = shape.n_kv_heads, shape.dim
        rope = _half_turn(shape.dim, DISTINCT)
        regions = replace(regions, key_scales=torch.full(channels, 2.6), key_zeros=torch.zeros(channels), rope=rope)
    keys, values = torch.randn(2, 1, DISTINCT, shape.dim).bfloat16()
    index = torch.arange(DISTINCT, dtype=torch.int32)[None]
    native.write_packed(
        replace(regions, table=table[:1], lens=_int32(1), dead=_int32(1)),
        EntryRows(_int32(1), _int32(1, value=DISTINCT), index, keys, values, index),
    )
    for arenas in pages.arrays:
        arenas[0][:] = arenas[0][:distinct].repeat(n // distinct, 1)
    return regions


def _even_tables(codec: Codec) -> Tables | None:
    """Tables as calibration would make them, for a codec that needs some."""
    if not codec.calibrated:
        return None
    key, value = (
        tuple(torch.linspace(-1, 1, 1 << side.format.bits).bfloat16().tolist()) for side in (codec.key, codec.value)
    )
    return Tables(key, value)


def _half_turn(dim: int, positions: int) -> Rope:
    """The rotation of a Llama."""

    def turn(x: Tensor, at: Tensor) -> Tensor:
        angles = at[0, :, None] * 1e4 ** (-torch.arange(dim // 2) / (dim // 2))
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    return Rope.of(turn, dim, positions)


def _layer(shape: AttentionCase, codec: str | None) -> Callable[[], object]:
    """One decode call of one layer; codec None: plain bfloat16."""
    slots = DEFAULT_SLOTS
    pages, table = _plain(shape, 0 if codec else shape.length, slots)
    packed = _packed(shape, codec) if codec else None
    n = shape.n_regions
    lens = _int32(n, value=0 if codec else shape.length)
    caps, recent, q_pos = _int32(n, value=UNBOUNDED), _int32(n), _int32(shape.batch, value=shape.length)
    q = torch.randn(shape.batch, shape.n_kv_heads * shape.group, shape.dim).bfloat16()
    new = torch.randn(shape.batch, shape.n_kv_heads, shape.dim).bfloat16()
    held, scale = lens.clone(), shape.dim**-0.5

    regions = StepRegions(PageRegions(pages, table, held), caps, recent, q_pos, KEEP_ALL, AttentionShape(scale), packed)
    args = DecodeArgs(q, new, new, regions)

    def call() -> object:
        held.copy_(lens)
        return native.decode(args)

    return call


def _model(shape: AttentionCase, codec: str | None) -> Callable[[], object]:
    layers = [_layer(shape, codec) for _ in range(shape.n_layers)]

    def call() -> object:
        for layer in layers:
            layer()
        return None

    return call


def paired_ratios(calls: dict[str, Callable[[], object]], anchor: str, rounds: int) -> dict[str, tuple[float, float]]:
    """(median seconds, median of the anchor's time over its own in the same round) of each call, in shuffled turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    rng = random.Random(0)
    for turn in range(rounds + 1):
        for name in rng.sample(list(calls), len(calls)):
            start = time.perf_counter()
            calls[name]()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {
        name: (statistics.median(own), statistics.median(a / b for a, b in zip(times[anchor], own, strict=True)))
        for name, own in times.items()
    }


def decode_rows(rounds: int = 20, shapes: list[AttentionCase] | None = None) -> list[KernelRow]:
    """Decode attention over every codec of `TARGETS` against bf16, and int2 against int4, over equal entries."""
    rows = []
    for shape in SHAPES if shapes is None else shapes:
        measured = paired_ratios({"bf16": _model(shape, None)} | {c: _model(shape, c) for c in TARGETS}, "bf16", rounds)
        for codec, (seconds, ratio) in measured.items():
            row = KernelRow(f"{shape}: {codec}", 1e3 * seconds / shape.n_layers, 0.0, ratio, "bf16")
            if codec == "bf16":
                row = replace(row, gb_per_s=shape.bf16_bytes * shape.n_layers / seconds / 1e9, of="itself")
            rows.append(replace(row, target=_target(codec, measured)))
    return rows


def _target(codec: str, measured: dict[str, tuple[float, float]]) -> float | None:
    """What the ratio must reach; that of int2 also not to be slower than int4."""
    if codec == "int2":
        return max(TARGETS["int2"], measured["int4"][1])
    return TARGETS.get(codec)


def packing_rows(rounds: int = 5, length: int = 4096, dim: int = 64) -> list[KernelRow]:
    """Packing and reading one layer's prompt, 16 query and 4 KV heads, as shares of its prefill attention alone."""
    heads, n_kv_heads = 16, 4
    q = torch.randn(heads, length, dim).bfloat16()
    k, v = torch.randn(2, n_kv_heads, length, dim).bfloat16()
    positions = torch.arange(length, dtype=torch.int32)
    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: native.prefill(PrefillArgs(q, k, v, positions, AttentionShape(dim**-0.5)))
    }
    for codec in (*TARGETS, "kvquant4"):
        packing, reading = _page_calls(codec, k, v)
        calls |= {f"packing {length}, D={dim}: {codec}": packing, f"reading {length}, D={dim}: {codec}": reading}
    measured = paired_ratios(calls, "prefill", rounds)
    return [
        KernelRow(name, 1e3 * seconds, 0.0, 1 / ratio, "prefill attention, its time")
        for name, (seconds, ratio) in measured.items()
        if name != "prefill"
    ]


def _page_calls(codec: str, keys: Tensor, values: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """What writes one layer's pages, and what reads them as numbers, as a later turn does."""
    n_kv_heads, length, dim = keys.shape
    regions = _packed(AttentionCase(dim, n_kv_heads, 1, 1, length), codec)
    if regions.rope is not None:  # of the keys as they come from a model
        regions = replace(regions, rope=_half_turn(dim, length))
    index = torch.arange(length, dtype=torch.int32).expand(n_kv_heads, length).contiguous()
    start, count = _int32(n_kv_heads), _int32(n_kv_heads, value=length)
    rows = EntryRows(start, count, index, keys, values, index)
    return lambda: native.write_packed(regions, rows), lambda: native.read_packed(regions, length, dim)


def codec_table(rounds: int = 20) -> list[KernelRow]:
    """All rows over codes."""
    return decode_rows(rounds) + packing_rows(max(3, rounds // 4))


def main() -> None:
    """Print the table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(f"isa {native.isa()}, {torch.get_num_threads()} threads, medians of {rounds} rounds in turns")
    for row in codec_table(rounds):
        print(f"{row.name:44} {row.ms:9.3f} ms {row.share:6.2f} of {row.of} {row.verdict}")


if __name__ == "__main__":
    main()
