"""Ops that plan prompts and let entries go, and those of the storage codec, on a CUDA GPU against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from gpu_machine import SCORE_TOLERANCE, TOLERANCE, Layer, Machine, error, ints
from gpu_rows import Row

from millpond.cache.entries.compaction import compact
from millpond.kernels import gpu, reference
from millpond.kernels.args import AttentionShape, HeadRuleArgs, PageRegions
from millpond.kernels.decode_rules import UNBOUNDED, Reduce
from millpond.kernels.eager.pages import gather, occupied
from millpond.kernels.selection_args import BestArgs, MoveArgs, ShareArgs
from millpond.kernels.transform_args import CodedDimensions
from millpond.kernels.window_args import PagedWindowArgs
from millpond.methods import METHODS
from millpond.policy.head_rules import HeadRulesPolicy
from millpond.policy.needs import Heads

WINDOW_SHAPES: list[tuple[int, int, int, int, int, int]] = [
    # regions, group, queries, key dim, slots, stored
    (8, 4, 32, 128, 16, 1500),
    (64, 4, 32, 64, 64, 700),
    (3, 7, 64, 80, 256, 300),
    (4, 1, 1, 256, 16, 900),
    (1, 16, 8, 576, 64, 520),
]


def check_window(machine: Machine) -> Iterator[Row]:
    """Attention of a few queries to every entry, from pages of ragged regions and from a tensor."""
    settings = [(Reduce.MEAN, 0.0, 0, False), (Reduce.MAX, 5.0, 100, True), (Reduce.SUM, 0.0, 0, True)]
    shapes = WINDOW_SHAPES[2:4] if machine.tiny else WINDOW_SHAPES
    for dtype, shape, (reduce, softcap, window, has_sink) in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), shapes, settings
    ):
        if not machine.mine():
            continue
        n_regions, group, n_queries, dim, slots, stored = shape
        stored = stored // 8 if machine.tiny else stored
        lens = [(stored, stored // 2, stored - 1, 0)[r % 4] for r in range(n_regions)]
        layer, device = Layer(machine, dtype, (dim, 16), slots, n_regions, stored, lens), machine.device
        q = torch.randn(n_regions, group, n_queries, dim, device=device).to(dtype)
        sink = torch.randn(n_regions * group, device=device) if has_sink else None
        kind = AttentionShape(dim**-0.5, softcap, window, sink)
        q_pos = ints(range(stored - n_queries // 2, stored + n_queries - n_queries // 2), device)
        args = PagedWindowArgs(q, q_pos, layer.regions, stored, kind, reduce)
        one = args.over(reference.read(layer.regions, stored))
        expected = reference.window_sums(args)
        found, again, apart = gpu.window_sums(args), gpu.window_sums(args), gpu.window_signal(one)
        yield {
            "op": "window",
            "dtype": str(dtype),
            "shape": str(shape),
            "rule": reduce.name,
            "out": error(apart, expected),
            "lse": 0.0,
            "pages": error(found, expected),
            "exact": torch.equal(found, again),
            "limit": SCORE_TOLERANCE,
        }


#: Layers, KV heads, entries of each.
SELECTION_SHAPES = [(4, 8, 8192), (2, 2, 131_072), (32, 3, 1000)]


def check_selection(machine: Machine) -> Iterator[Row]:
    """The best entries of regions, what heads share of a total, and moves in place and to other pages."""
    device, slots = machine.device, 16
    for shape, dtype in itertools.product(SELECTION_SHAPES, (torch.bfloat16, torch.float32)):
        if not machine.mine():
            continue
        n_layers, n_heads, n = (2, 3, 70) if machine.tiny else shape
        dims = (24, 16) if machine.tiny or n > 10_000 else (128, 128)
        n_regions = n_layers * n_heads
        layer = Layer(machine, dtype, dims, slots, n_regions, n, [n] * n_regions)
        other = Layer(machine, dtype, dims, slots, n_regions, n, [n] * n_regions)
        twin = layer.twin()
        value = torch.randn(n_regions, n, device=device).round(decimals=2)  # of which many are equal
        pinned = ints([0, 4, n - n // 10, n], device).view(1, 2, 2).expand(n_regions, -1, -1).contiguous()
        least, total = ints([n // 8 + 4] * n_layers, device), ints([n_heads * n // 5] * n_layers, device)
        share = ShareArgs(value.view(n_layers, n_heads, n), pinned, least, total)
        same = torch.equal(reference.shared_counts(share), gpu.shared_counts(share))
        numbers = [n // 5 + r for r in range(n_regions)]
        counts, width = ints(numbers, device), max(numbers)
        best = BestArgs(value, pinned, counts, width)
        columns, found = reference.best_columns(best).columns, gpu.best_columns(best).columns
        within = torch.arange(width, device=device) < counts[:, None]
        same &= torch.equal(torch.where(within, columns, 0), torch.where(within, found, 0))
        for target in (other, twin):
            into = twin.regions if target is twin else other.regions
            gpu.move_entries(MoveArgs(twin.regions, into, columns, counts))
        reference.move_entries(MoveArgs(layer.regions, layer.regions, columns, counts))
        want, *got = (
            reference.read(PageRegions(place.pages, place.table, counts), width) for place in (layer, other, twin)
        )
        same &= all(a is b is None or torch.equal(a, b) for one in got for a, b in zip(one, want, strict=True))
        yield {
            "op": "selection",
            "dtype": str(dtype),
            "shape": str(shape),
            "rule": "",
            "out": 0.0,
            "lse": 0.0,
            "pages": 0.0,
            "exact": same,
            "limit": 0.0,
        }


def check_transform(machine: Machine) -> Iterator[Row]:
    """Bit planes of the codec `transform`: numbers to planes exactly, tokens to numbers and back nearly."""
    device = machine.device
    for d, dtype in itertools.product((1024, 80), (torch.bfloat16, torch.float32)):
        if not machine.mine():
            continue
        n, rows = (64, 40) if machine.tiny else (4096, d - d // 10)
        d = 48 if machine.tiny else d
        x, mean, matrix = (torch.randn(*of, device=device) for of in ((n, d), (d,), (rows, d)))
        x = x.to(dtype)
        bits = (torch.arange(rows, device=device) % 8).to(torch.uint8)
        chosen = bits.nonzero()[:, 0]
        z = gpu.project(x, mean, matrix, chosen)
        expected = (x.double() - mean.double()) @ matrix[chosen].double().T
        tables = [torch.randn(1 << width, device=device).sort().values for width in range(1, 8)]
        cuts = torch.cat([torch.cat([(t[1:] + t[:-1]) * 0.5, t[-1:]]) for t in tables])[None]
        shift, scale = torch.randn(rows, device=device), torch.rand(rows, device=device) * d**0.5 + 0.1
        words = int((torch.arange(rows) % 8).sum())
        planes = torch.zeros(n // 32, words, dtype=torch.int32, device=device)
        gpu.encode_planes(z, CodedDimensions(shift, scale, bits, cuts), planes, 0)
        u = (z - shift[chosen]) / scale[chosen]
        at, wrong = 0, 0
        for number, width in enumerate(bits[chosen].tolist()):
            table = tables[width - 1]
            codes = torch.bucketize(u[:, number].contiguous(), (table[1:] + table[:-1]) * 0.5).view(-1, 32)
            for bit in range(width):
                want = (((codes >> bit) & 1) << torch.arange(32, device=device)).sum(1)
                wrong += int((planes[:, at + bit].long() & 0xFFFFFFFF != want).sum())
            at += width
        yield {
            "op": "transform",
            "dtype": str(dtype),
            "shape": f"{n} x {d}",
            "rule": "",
            "out": error(z, expected),
            "lse": 0.0,
            "pages": 0.0,
            "exact": wrong == 0,
            "limit": TOLERANCE[torch.float32],
        }


def check_admit(machine: Machine) -> Iterator[Row]:
    """What heads with rules of their own let go of after a step, against the policy in torch."""
    policy = METHODS.get("fastgen")(special="0;9", punctuation="3;4;5", sinks=2)
    assert isinstance(policy, HeadRulesPolicy)
    heads, stored, device = 5, 70 if machine.tiny else 900, machine.device
    lens = [n for n in (stored, stored // 2, 1) for _ in range(heads)]
    cases = itertools.product((torch.bfloat16, torch.float32), (UNBOUNDED, stored // 3), (0, stored))
    for dtype, budget, window in cases:
        if not machine.mine():
            continue
        layer = Layer(machine, dtype, (128, 80), 16, len(lens), stored + 1, lens)
        twin, seen = layer.twin(), layer.table.shape[1] * 16
        n_seen = torch.full((3,), seen, device=device)
        ids = torch.randint(0, 12, (3, seen), device=device)
        kinds, local = torch.arange(len(lens), device=device) % 5, ints([stored // 9] * len(lens), device)
        classes, most = policy.classes.table(device), torch.full((3,), heads * budget, device=device)
        rule = classes, kinds, local, n_seen, policy.quota(n_seen), most, policy.protect.sinks, window
        gpu.admit(HeadRuleArgs(twin.regions, torch.arange(3, device=device), ids, *rule, bounded=budget < UNBOUNDED))
        slots, valid = occupied(layer.pages, layer.table, layer.lens, stored)
        by_head = (3, heads, stored)
        positions = torch.where(valid, gather(layer.pages.positions, slots), -1).view(by_head)
        hidden = (positions >= 0) & (seen - positions >= window) if window else positions < -1
        told = policy.classes_of(ids.gather(1, positions.clamp(min=0).flatten(1).long()).view(by_head), positions)
        shown = positions.masked_fill(hidden, -1)
        scores, of_heads = gather(layer.pages.scores, slots).view(by_head), kinds.view(3, heads)
        leaving = policy.leaving(Heads(scores, shown, told, of_heads, n_seen, local[:3], most))
        leave = (hidden | leaving).flatten(0, 1)
        compact(layer.pages, slots, valid, leave)
        stay = (valid & ~leave).sum(1).int()
        got, want = (gpu.read(PageRegions(place.pages, place.table, stay), stored) for place in (twin, layer))
        yield {
            "op": "admit",
            "dtype": str(dtype),
            "shape": str((3, heads, stored)),
            "rule": f"{budget} {window}",
            "out": 0.0,
            "lse": 0.0,
            "pages": 0.0,
            "exact": torch.equal(twin.lens, stay) and all(map(torch.equal, got[:4], want[:4])),
            "limit": 0.0,
        }


CHECKS = (check_window, check_selection, check_transform, check_admit)
