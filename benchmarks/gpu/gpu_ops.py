"""Every op on a CUDA GPU against the reference there: the sections `check` and `graph` of gpu_check.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import gpu_plan_ops
import torch
from gpu_machine import SCORE_TOLERANCE, TOLERANCE, Layer, Machine, error, ints, page_error
from gpu_rows import Row
from torch import Tensor

from millpond.kernels import gpu, reference
from millpond.kernels.args import AttentionShape, DecodeArgs, EntryRows, PageRegions, PrefillArgs, StepRegions
from millpond.kernels.decode_rules import KEEP_ALL, DecodeRule, Evict, Reduce, Signal
from millpond.kernels.decoder_ops import DecoderOps, GatedActivation, Norm
from millpond.kernels.gpu import few_rows
from millpond.kernels.gpu.dense import FusedDense

HEADS, KV_HEADS, DIM = 32, 8, 128  # of the captured step

DECODE_SHAPES: list[tuple[int, int, tuple[int, int], int, int]] = [
    # KV heads, group, dims, slots, stored
    (8, 4, (128, 128), 16, 1500),
    (2, 1, (64, 64), 32, 700),
    (3, 7, (80, 96), 64, 300),
    (1, 16, (256, 256), 64, 900),
    (2, 8, (40, 128), 256, 1100),
    (1, 16, (576, 512), 64, 520),
]
DECODE_RULES = [
    (KEEP_ALL, 0.0, 0, False),
    (DecodeRule(Signal.SUM, Reduce.MEAN, Evict.ACC, sinks=4), 0.0, 0, False),
    (DecodeRule(Signal.SUM, Reduce.MAX, Evict.ACC_MEAN, decay=0.9, shared=True), 5.0, 0, True),
    (DecodeRule(Signal.LAST, Reduce.SUM, Evict.OLDEST, sinks=2), 0.0, 200, False),
    (DecodeRule(Signal.NONE, evict=Evict.RANDOM, seed=77), 0.0, 0, True),
    (DecodeRule(Signal.NONE, evict=Evict.ACC, shared=True), 3.0, 100, True),
]


def check_decode(machine: Machine) -> Iterator[Row]:
    dtypes = (torch.bfloat16,) if machine.tiny else (torch.bfloat16, torch.float16, torch.float32)
    shapes = DECODE_SHAPES[1:3] if machine.tiny else DECODE_SHAPES
    for dtype, shape, (rule, softcap, window, has_sink) in itertools.product(dtypes, shapes, DECODE_RULES):
        if not machine.mine():
            continue
        heads, group, dims, slots, stored = shape
        stored = stored // 8 if machine.tiny else stored
        lens = [stored, stored, stored // 2, 0]
        n_regions = len(lens) * heads
        layer = Layer(machine, dtype, dims, slots, n_regions, stored + 1, [n for n in lens for _ in range(heads)])
        twin, device = layer.twin(), machine.device
        caps = ints([n for n in (stored, stored + 1, stored // 2, 5) for _ in range(heads)], device)
        recent = ints([3] * n_regions, device)
        at = layer.table.shape[1] * slots
        q_pos = ints([at, at + 5, at, at], device)
        if stored % 2:
            q_pos[2] = -1
        q = torch.randn(len(lens), heads * group, dims[0], device=device).to(dtype)
        k = torch.randn(len(lens), heads, dims[0], device=device).to(dtype)
        v = torch.randn(len(lens), heads, dims[1], device=device).to(dtype)
        sink = torch.randn(heads * group, device=device) if has_sink else None
        results = []
        for implementation, place in ((reference, layer), (gpu, twin)):
            plain, kind = place.regions, AttentionShape(dims[0] ** -0.5, softcap, window, sink)
            regions = StepRegions(plain, caps, recent, q_pos, rule, kind)
            results.append(implementation.decode(DecodeArgs(q, k, v, regions)))
        (out, lse, gone), (out2, lse2, gone2) = results
        yield {
            "op": "decode",
            "dtype": str(dtype),
            "shape": str(shape),
            "rule": f"{rule.signal.name} {rule.evict.name}",
            "out": error(out2, out),
            "lse": error(lse2, lse),
            "pages": page_error(twin.pages, layer.pages),
            "exact": torch.equal(gone, gone2) and torch.equal(layer.lens, twin.lens),
            "limit": TOLERANCE[dtype],
        }


PREFILL_SHAPES: list[tuple[int, int, tuple[int, int], int, int]] = [
    # KV heads, group, dims, rows, past
    (8, 4, (128, 128), 1000, 0),
    (2, 1, (64, 64), 700, 130),
    (1, 7, (80, 96), 333, 64),
    (2, 2, (256, 256), 515, 33),
    (1, 16, (192, 128), 260, 0),
]


def check_prefill(machine: Machine) -> Iterator[Row]:
    settings = [
        (None, 0.0, 0, False),
        (Reduce.MEAN, 0.0, 0, False),
        (Reduce.MAX, 5.0, 100, True),
        (Reduce.SUM, 0.0, 0, True),
    ]
    shapes = PREFILL_SHAPES[1:3] if machine.tiny else PREFILL_SHAPES
    for dtype, shape, (colsum, softcap, window, has_sink) in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), shapes, settings
    ):
        if not machine.mine():
            continue
        heads, group, dims, rows, past = shape
        rows = rows // 8 if machine.tiny else rows
        torch.manual_seed(0)
        device = machine.device
        q = torch.randn(rows, heads * group, dims[0], device=device).to(dtype).transpose(0, 1)
        k = torch.randn(heads, past + rows, dims[0], device=device).to(dtype)
        v = torch.randn(heads, past + rows, dims[1], device=device).to(dtype)
        past_pos = torch.randint(-1, 50, (heads, past), device=device).int() if past else None
        sink = torch.randn(heads * group, device=device) if has_sink else None
        kind = AttentionShape(dims[0] ** -0.5, softcap, window, sink)
        args = PrefillArgs(q, k, v, ints(range(50, 50 + rows), device), kind, past_pos, colsum=colsum)
        out, lse, sums = reference.prefill(args)
        out2, lse2, sums2 = gpu.prefill(args)
        yield {
            "op": "prefill",
            "dtype": str(dtype),
            "shape": str(shape),
            "rule": str(colsum and colsum.name),
            "out": error(out2, out),
            "lse": error(lse2, lse),
            "exact": True,
            "limit": TOLERANCE[dtype],
            "pages": error(sums2, sums) if sums is not None and sums2 is not None else 0.0,
        }


def check_copies(machine: Machine) -> Iterator[Row]:
    device = machine.device
    for dtype, dims, slots in itertools.product((torch.bfloat16, torch.float32), ((128, 128), (80, 33)), (16, 256)):
        if not machine.mine():
            continue
        width = 40 if machine.tiny else 700
        layer = Layer(machine, dtype, dims, slots, 6, width + 7, [0] * 6)
        twin = layer.twin()
        start, count = ints([0, 1, 7, 0, 3, 2], device), ints([width, width - 1, 0, 5, 1, width], device)
        index = torch.randint(0, width, (6, width), device=device).int()
        keys, values = torch.randn(6, width, dims[0], device=device), torch.randn(6, width, dims[1], device=device)
        positions, scores = torch.arange(width, device=device).int().expand(6, -1), torch.rand(6, width, device=device)
        for implementation, place in ((reference, layer), (gpu, twin)):
            implementation.write(place.regions, EntryRows(start, count, index, keys, values, positions, scores))
        want = reference.read(PageRegions(layer.pages, layer.table, count), width)
        got = gpu.read(PageRegions(twin.pages, twin.table, count), width)
        same = all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))
        same &= torch.equal(gpu.read_scores(PageRegions(twin.pages, twin.table, count), width), want.scores)
        yield {
            "op": "write, read",
            "dtype": str(dtype),
            "shape": f"{dims} {slots}",
            "rule": "",
            "out": 0.0,
            "lse": 0.0,
            "pages": page_error(twin.pages, layer.pages),
            "exact": same,
            "limit": 0.0,
        }


DENSE_SHAPES: list[tuple[int, int, tuple[int, int], tuple[int, int], int]] = [
    # rows, width, heads, head dim and of it rotated, of the feed-forward
    (1, 4096, (32, 8), (128, 128), 14336),
    (16, 4096, (32, 8), (128, 128), 14336),
    (700, 960, (15, 5), (64, 64), 2560),
    (3, 2560, (32, 32), (80, 20), 10240),
    (5, 16384, (128, 8), (128, 128), 53248),
]


def check_dense(machine: Machine) -> Iterator[Row]:
    """Norms of rows and of heads, rotary embedding and activations against torch's ops."""
    shapes = [(3, 96, (3, 1), (16, 12), 100)] if machine.tiny else DENSE_SHAPES
    ours, torchs = FusedDense(), DecoderOps()
    for dtype, shape in itertools.product((torch.bfloat16, torch.float16, torch.float32), shapes):
        if not machine.mine():
            continue
        n, width, heads, (dim, rotary), wide = shape
        torch.manual_seed(0)

        def random(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*size, device=machine.device).to(dtype)

        qkv = random(n, (heads[0] + 2 * heads[1]) * dim)
        q = qkv.view(n, -1, dim)[:, : heads[0]]
        norms = [(random(n, width), width, None), (random(n, width), width, random(width)), (q, dim, None)]
        worst = 0.0
        for x, size, bias in norms:
            norm = Norm(random(size), bias, 1e-6, bias is not None)
            worst = max(worst, error(ours.norm(x, norm), torchs.norm(x, norm)))
        for act, gated in itertools.product(GatedActivation, (True, False)):
            parts = list(torch.split(random(n, 2 * wide), wide, -1))[: 1 + gated]
            worst = max(worst, error(ours.gated(parts, act), torchs.gated(parts, act)))
        turned = []
        cos, sin = random(n, rotary), random(n, rotary)
        for ops in (ours, torchs):
            turned.append(qkv.clone())
            q, k, _ = torch.split(turned[-1].view(n, -1, dim), [heads[0], heads[1], heads[1]], 1)
            ops.rotate_(q, k, cos, sin)
        yield {
            "op": "dense",
            "dtype": str(dtype),
            "shape": str(shape),
            "rule": "",
            "out": max(worst, error(*turned)),
            "lse": 0.0,
            "pages": 0.0,
            "exact": torch.equal(*turned) or not machine.cuda,  # the interpreter cuts bfloat16 off
            "limit": TOLERANCE[dtype],
        }


FEW_ROWS_SHAPES: list[tuple[int, int, int]] = [
    # rows, of the matrix, of numbers each
    (1, 6144, 4096),
    (8, 28672, 4096),
    (2, 4096, 14336),
    (3, 1001, 333),
]


def check_few_rows(machine: Machine) -> Iterator[Row]:
    """Products of few rows by the kernel against torch's, whichever is faster."""
    shapes = [(1, 70, 2100), (3, 65, 130)] if machine.tiny else FEW_ROWS_SHAPES
    for dtype, (rows, n, k) in itertools.product((torch.bfloat16, torch.float16, torch.float32), shapes):
        if not machine.mine():
            continue
        torch.manual_seed(0)
        sizes = ((rows, k), (n, k), (n,), (rows, n))
        x, weight, bias, residual = (torch.randn(size, device=machine.device).to(dtype) for size in sizes)
        worst = 0.0
        for some, base in itertools.product((None, bias), (None, residual)):
            found, want = (
                multiplied(x, weight, some, None if base is None else base.clone())
                for multiplied in (few_rows.multiply, few_rows.by_torch)
            )
            worst = max(worst, error(found, want))
        yield {
            "op": "few rows",
            "dtype": str(dtype),
            "shape": str((rows, n, k)),
            "rule": "",
            "out": worst,
            "lse": 0.0,
            "pages": 0.0,
            "exact": True,
            "limit": TOLERANCE[dtype],
        }


CHECKS = (check_copies, check_dense, check_few_rows, check_decode, check_prefill, *gpu_plan_ops.CHECKS)


def run_check(machine: Machine) -> list[Row]:
    rows = []
    for row in itertools.chain(*(check(machine) for check in CHECKS)):
        # the log-sum-exp and the scores never pass through half precision, whatever the dtype
        sharp = max(row["lse"], row["pages"]) <= SCORE_TOLERANCE
        row["ok"] = bool(row["exact"] and sharp and row["out"] <= row["limit"])
        rows.append(row)
        if not row["ok"]:
            print("MISMATCH", row, flush=True)
    for op, dtype in sorted({(r["op"], r["dtype"]) for r in rows}):
        same = [r for r in rows if (r["op"], r["dtype"]) == (op, dtype)]
        worst_by = {name: max(r[name] for r in same) for name in ("out", "lse", "pages")}
        passed = sum(r["ok"] for r in same)
        print(f"{op:12} {dtype:15} {passed}/{len(same)} ok, max error", *(f"{k} {v:.1e}" for k, v in worst_by.items()))
    return rows


def run_graph(machine: Machine) -> list[Row]:
    """Steps through static buffers: the host writes q, k, v and the positions, the graph does the rest."""
    n_seq, stored, steps, device = 4, 40 if machine.tiny else 600, 3 if machine.tiny else 20, machine.device
    regions, rule = n_seq * KV_HEADS, DecodeRule(Signal.SUM, Reduce.MEAN, Evict.ACC, sinks=4)
    layer = Layer(machine, torch.bfloat16, (DIM, DIM), 64, regions, stored + 2, [stored] * regions)
    twin = layer.twin()
    q = torch.zeros(n_seq, HEADS, DIM, dtype=torch.bfloat16, device=device)
    k, v = (torch.zeros(n_seq, KV_HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
    caps, recent, q_pos = ints([stored + 2] * regions, device), ints([5] * regions, device), ints([-1] * n_seq, device)
    results: list[tuple[Tensor, ...]] = []

    def args(place: Layer) -> DecodeArgs:
        return DecodeArgs(q, k, v, StepRegions(place.regions, caps, recent, q_pos, rule, AttentionShape(DIM**-0.5)))

    def step() -> None:
        results[:] = [gpu.decode(args(twin))]

    replay = machine.graphed(step)  # with all sequences inactive: nothing is stored meanwhile
    worst, exact = 0.0, True
    for n in range(steps):
        torch.manual_seed(n)
        for tensor in (q, k, v):
            tensor.normal_()
        q_pos.copy_(ints([10_000 + n, 20_000 + n, -1 if n % 3 == 0 else 10_000 + n, 10_000 + n], device))
        replay()
        want = reference.decode(args(layer))
        worst = max(worst, error(results[0][0], want[0]))
        exact = exact and torch.equal(results[0][2], want[2]) and torch.equal(layer.lens, twin.lens)
    row = {"steps": steps, "captured": machine.cuda, "out": worst, "exact": exact}
    row["ok"] = bool(exact and worst <= TOLERANCE[torch.bfloat16] and page_error(twin.pages, layer.pages) < 1e-3)
    print("graph", row, flush=True)
    return [row]
