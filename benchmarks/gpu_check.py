"""Check and time the Triton kernels on a CUDA GPU.

    PYTHONPATH=src python benchmarks/gpu_check.py --out DIR

Sections (--only takes a comma-separated choice):
    check    every op against the reference on the device; a mismatch makes the exit status 1
    graph    a decode step with eviction, captured in a CUDA graph and replayed, against the reference
    decode   attention of one layer, 32 query heads over 8 KV heads of width 128, as a share of copy bandwidth
    prefill  causal attention with and without column sums, against the flash attention of torch
    codes    decode over packed pages, see gpu_codes.py: every format against the reference and beside bfloat16, and
             generate() over codes against the CPU
    sweep    decode with other split, block, warp and stage counts
Results go to DIR/gpu_check.json after each section. --interpret --tiny runs all of it on a CPU in the interpreter of
Triton: a test of this script, not of speed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
import torch.nn.functional as F
from gpu_codes import run_codes
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from millpond.kernels import gpu, reference
from millpond.kernels.pages import PageArrays
from millpond.kernels.rules import KEEP_ALL, DecodeRule, Evict, Reduce, Signal

if TYPE_CHECKING:
    from torch.cuda import CUDAGraph

DECODE: Any = importlib.import_module("millpond.kernels.gpu.decode")  # the package shows the function under this name
Row = dict[str, Any]

HEADS, KV_HEADS, DIM = 32, 8, 128
WORKING_SET = 2**30  # bytes that timed calls rotate through: 20 times the second-level cache of an H200
ARENA_BYTES = 2**28
#: relative to the largest number of the reference: float32 has the order of sums, the others the rounding of p
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

SCORE_TOLERANCE = 1e-4
FAR = 1e9  # an infinity that JSON can hold


class Machine:
    """Where the script runs, and how it measures time there."""

    def __init__(self, interpret: bool, tiny: bool) -> None:
        self.cuda = not interpret
        self.tiny = tiny
        if self.cuda and not torch.cuda.is_available():
            raise SystemExit("no CUDA device; use --interpret --tiny to test this script on a CPU")
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.repeats = 20 if self.cuda else 1

    def describe(self) -> Row:
        name = torch.cuda.get_device_name() if self.cuda else "cpu, interpreter"
        triton = importlib.import_module("triton")
        return {"device": name, "torch": torch.__version__, "triton": triton.__version__, "tiny": self.tiny}

    def ms(self, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """Median time of `run` in milliseconds, after three runs that do not count."""
        times: list[float] = []
        for _ in range(self.repeats + (3 if self.cuda else 0)):
            before()
            if self.cuda:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                run()
                end.record()
                torch.cuda.synchronize()
                spent = begin.elapsed_time(end)
            else:
                start = time.perf_counter()
                run()
                spent = (time.perf_counter() - start) * 1e3
            times.append(spent)
        return statistics.median(times[3:] if self.cuda else times)

    def graphed(self, run: Callable[[], object]) -> Callable[[], object]:
        """`run` as one replay of a CUDA graph; `run` itself on the CPU. Runs it twice to compile."""
        if not self.cuda:
            return run
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph: CUDAGraph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


# ---------------------------------------------------------------------------------------------- making data


def ints(values: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(device)


class Layer:
    """The pages, the table and the lengths of one layer, filled with random entries in pages of random order."""

    def __init__(
        self, machine: Machine, dtype: torch.dtype, dims: tuple[int, int], slots: int, n_regions: int, width: int,
        lens: list[int], seed: int = 0,
    ) -> None:  # fmt: skip
        device = machine.device
        torch.manual_seed(seed)
        n_pages = -(-width // slots)
        page_bytes = slots * sum(dims) * dtype.itemsize
        fit = max(1, min(n_regions * n_pages, ARENA_BYTES // page_bytes))
        per_arena = 1 << (fit.bit_length() - 1) if fit > 8 else 4
        self.pages = PageArrays(per_arena, slots, *dims, dtype, device)
        while self.pages.n_arenas * per_arena < n_regions * n_pages:
            self.pages.add_arena()
        for tensor in (*self.pages.keys, *self.pages.values):
            tensor.normal_()
        for tensor in (*self.pages.positions, *self.pages.scores):
            tensor.zero_()
        self.table = torch.randperm(n_regions * n_pages).view(n_regions, n_pages).int().to(device)
        self.lens = ints(lens, device)
        places = torch.arange(n_pages * slots, device=device) % slots
        page = self.table.long().repeat_interleave(slots, 1)
        # positions: a permutation, the same in each region; accumulators far apart, so that rounding decides nothing
        order = torch.randperm(n_pages * slots, device=device)
        for n in range(self.pages.n_arenas):
            here = page // per_arena == n
            rows, columns = page[here] % per_arena, places.expand_as(page)[here]
            self.pages.positions[n][rows, columns] = order.expand_as(page)[here].int()
            self.pages.scores[n][rows, columns] = (order.flip(0) * 0.37).expand_as(page)[here]

    def twin(self) -> Layer:
        other = object.__new__(Layer)
        old = self.pages
        other.pages = PageArrays(old.pages_per_arena, old.slots, old.key_dim, old.value_dim, old.dtype, old.device)
        other.pages.keys, other.pages.values = [t.clone() for t in old.keys], [t.clone() for t in old.values]
        other.pages.positions, other.pages.scores = [t.clone() for t in old.positions], [t.clone() for t in old.scores]
        other.pages._refresh()
        other.table, other.lens = self.table, self.lens.clone()
        return other


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest finite number of `want`; infinities must agree."""
    got, want = got.double(), want.double()
    finite = want.isfinite()
    if not bool((got.isfinite() == finite).all()) or not bool((got[~finite] == want[~finite]).all()):
        return FAR
    if want.numel() == 0 or not bool(finite.any()):
        return 0.0
    return float((got - want)[finite].abs().max() / want[finite].abs().max().clamp(min=1e-3))


def page_error(got: PageArrays, want: PageArrays) -> float:
    """FAR unless keys, values and positions are equal bit by bit; else the error of the accumulators."""
    for name in ("keys", "values", "positions"):
        if not all(map(torch.equal, getattr(got, name), getattr(want, name))):
            return FAR
    return max(map(error, got.scores, want.scores))


# ---------------------------------------------------------------------------------------------- check


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
        heads, group, dims, slots, stored = shape
        stored = stored // 8 if machine.tiny else stored
        lens = [stored, stored, stored // 2, 0]
        regions = len(lens) * heads
        layer = Layer(machine, dtype, dims, slots, regions, stored + 1, [n for n in lens for _ in range(heads)])
        twin, device = layer.twin(), machine.device
        caps = ints([n for n in (stored, stored + 1, stored // 2, 5) for _ in range(heads)], device)
        recent = ints([3] * regions, device)
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
            results.append(
                implementation.decode(
                    q, k, v, place.pages, place.table, place.lens, caps, recent, q_pos, rule,
                    scale=dims[0] ** -0.5, softcap=softcap, window=window, sink_logits=sink,
                )
            )  # fmt: skip
        (out, lse, gone), (out2, lse2, gone2) = results
        yield {
            "op": "decode", "dtype": str(dtype), "shape": str(shape), "rule": f"{rule.signal.name} {rule.evict.name}",
            "out": error(out2, out), "lse": error(lse2, lse), "pages": page_error(twin.pages, layer.pages),
            "exact": torch.equal(gone, gone2) and torch.equal(layer.lens, twin.lens), "limit": TOLERANCE[dtype],
        }  # fmt: skip


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
        (None, 0.0, 0, False), (Reduce.MEAN, 0.0, 0, False), (Reduce.MAX, 5.0, 100, True), (Reduce.SUM, 0.0, 0, True),
    ]  # fmt: skip
    shapes = PREFILL_SHAPES[1:3] if machine.tiny else PREFILL_SHAPES
    for dtype, shape, (colsum, softcap, window, has_sink) in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), shapes, settings
    ):
        heads, group, dims, rows, past = shape
        rows = rows // 8 if machine.tiny else rows
        torch.manual_seed(0)
        device = machine.device
        q = torch.randn(rows, heads * group, dims[0], device=device).to(dtype).transpose(0, 1)
        k = torch.randn(heads, past + rows, dims[0], device=device).to(dtype)
        v = torch.randn(heads, past + rows, dims[1], device=device).to(dtype)
        past_pos = torch.randint(-1, 50, (heads, past), device=device).int() if past else None
        args = (q, k, v, ints(range(50, 50 + rows), device), past_pos)
        sink = torch.randn(heads * group, device=device) if has_sink else None
        options: Row = {"scale": dims[0] ** -0.5, "softcap": softcap, "window": window, "sink_logits": sink}
        out, lse, sums = reference.prefill(*args, **options, colsum=colsum)
        out2, lse2, sums2 = gpu.prefill(*args, **options, colsum=colsum)
        yield {
            "op": "prefill", "dtype": str(dtype), "shape": str(shape), "rule": str(colsum and colsum.name),
            "out": error(out2, out), "lse": error(lse2, lse), "exact": True, "limit": TOLERANCE[dtype],
            "pages": error(sums2, sums) if sums is not None and sums2 is not None else 0.0,
        }  # fmt: skip


def check_copies(machine: Machine) -> Iterator[Row]:
    device = machine.device
    for dtype, dims, slots in itertools.product((torch.bfloat16, torch.float32), ((128, 128), (80, 33)), (16, 256)):
        width = 40 if machine.tiny else 700
        layer = Layer(machine, dtype, dims, slots, 6, width + 7, [0] * 6)
        twin = layer.twin()
        start, count = ints([0, 1, 7, 0, 3, 2], device), ints([width, width - 1, 0, 5, 1, width], device)
        index = torch.randint(0, width, (6, width), device=device).int()
        keys, values = torch.randn(6, width, dims[0], device=device), torch.randn(6, width, dims[1], device=device)
        positions, scores = torch.arange(width, device=device).int().expand(6, -1), torch.rand(6, width, device=device)
        for implementation, place in ((reference, layer), (gpu, twin)):
            implementation.write(place.pages, place.table, start, count, index, keys, values, positions, scores)
        want = reference.read(layer.pages, layer.table, count, width)
        got = gpu.read(twin.pages, twin.table, count, width)
        yield {
            "op": "write, read", "dtype": str(dtype), "shape": f"{dims} {slots}", "rule": "", "out": 0.0, "lse": 0.0,
            "pages": page_error(twin.pages, layer.pages), "exact": all(map(torch.equal, got, want)), "limit": 0.0,
        }  # fmt: skip


def run_check(machine: Machine) -> list[Row]:
    rows = []
    for row in itertools.chain(check_copies(machine), check_decode(machine), check_prefill(machine)):
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


# ---------------------------------------------------------------------------------------------- graph


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

    def step() -> None:
        where = (twin.pages, twin.table, twin.lens)
        results[:] = [gpu.decode(q, k, v, *where, caps, recent, q_pos, rule, scale=DIM**-0.5)]

    replay = machine.graphed(step)  # with all sequences inactive: nothing is stored meanwhile
    worst, exact = 0.0, True
    for n in range(steps):
        torch.manual_seed(n)
        for tensor in (q, k, v):
            tensor.normal_()
        q_pos.copy_(ints([10_000 + n, 20_000 + n, -1 if n % 3 == 0 else 10_000 + n, 10_000 + n], device))
        replay()
        want = reference.decode(
            q, k, v, layer.pages, layer.table, layer.lens, caps, recent, q_pos, rule, scale=DIM**-0.5
        )
        worst = max(worst, error(results[0][0], want[0]))
        exact = exact and torch.equal(results[0][2], want[2]) and torch.equal(layer.lens, twin.lens)
    row = {"steps": steps, "captured": machine.cuda, "out": worst, "exact": exact}
    row["ok"] = bool(exact and worst <= TOLERANCE[torch.bfloat16] and page_error(twin.pages, layer.pages) < 1e-3)
    print("graph", row, flush=True)
    return [row]


# ---------------------------------------------------------------------------------------------- speed


def copy_gb_per_s(machine: Machine) -> float:
    """Bytes read plus bytes written by a device-to-device copy, per second."""
    n = 2**20 if machine.tiny else 2**31
    source = torch.zeros(n, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * n / machine.ms(lambda: target.copy_(source)) / 1e6


VARIANTS = {
    "plain": KEEP_ALL,
    "scores": DecodeRule(Signal.SUM),
    "scores, evict": DecodeRule(Signal.SUM, evict=Evict.ACC, sinks=4),
}


def time_decode(machine: Machine, batch: int, stored: int, slots: int, bandwidth: float, rules: list[str]) -> list[Row]:
    device, heads, dim = machine.device, (2 if machine.tiny else KV_HEADS), (32 if machine.tiny else DIM)
    group, regions = HEADS // KV_HEADS, batch * heads
    n_bytes = regions * stored * 2 * dim * 2
    copies = 1 if machine.tiny else -(-WORKING_SET // n_bytes)
    start = [stored - 16] * regions  # room for what the timed calls append, in the same number of pages
    layers = [
        Layer(machine, torch.bfloat16, (dim, dim), slots, regions, stored, start, seed=n) for n in range(copies)
    ]  # fmt: skip
    q = torch.randn(batch, heads * group, dim, device=device).bfloat16()
    k, v = (torch.randn(batch, heads, dim, device=device).bfloat16() for _ in range(2))
    recent, q_pos = ints([32] * regions, device), ints([stored] * batch, device)
    rows = []
    for name in rules:
        caps = ints([stored - 16 if "evict" in name else 2**30] * regions, device)

        def step(rule: DecodeRule = VARIANTS[name], caps: Tensor = caps) -> None:
            for layer in layers:
                gpu.decode(q, k, v, layer.pages, layer.table, layer.lens, caps, recent, q_pos, rule, scale=dim**-0.5)

        def reset() -> None:
            for layer in layers:
                layer.lens.fill_(stored - 16)

        replay = machine.graphed(step)
        ms = machine.ms(replay, reset) / copies
        eager = machine.ms(step, reset) / copies
        rate = n_bytes / ms / 1e6
        rows.append({
            "batch": batch, "stored": stored, "page": slots, "rule": name, "ms": ms, "ms_without_graph": eager,
            "gb_per_s": rate, "share_of_copy": rate / bandwidth,
        })  # fmt: skip
    return rows


def run_decode(machine: Machine) -> list[Row]:
    bandwidth = copy_gb_per_s(machine)
    print(f"copy bandwidth {bandwidth:.0f} GB/s (read + write)")
    print("\n batch stored  page  rule              ms   eager  share")
    rows: list[Row] = [{"copy_gb_per_s": bandwidth}]
    grid = itertools.product((16, 64), (4096, 8192, 16384, 32768), (16, 32, 64, 256))
    for batch, stored, slots in [(2, 80, 16)] if machine.tiny else grid:
        for row in time_decode(machine, batch, stored, slots, bandwidth, list(VARIANTS)):
            rows.append(row)
            print(
                f"{batch:6} {stored:6} {slots:5}  {row['rule']:14} {row['ms']:7.3f} {row['ms_without_graph']:7.3f} "
                f"{row['share_of_copy']:6.1%}",
                flush=True,
            )
        if machine.cuda:
            torch.cuda.empty_cache()
    return rows


def run_sweep(machine: Machine) -> list[Row]:
    bandwidth, rows = copy_gb_per_s(machine), []
    usual = DECODE.TUNING
    grid = [
        DECODE.Tuning(split, block, warps, stages)
        for split, block, warps, stages in itertools.product((256, 512, 1024), (32, 64, 128), (4, 8), (3, 4))
    ]
    shapes = [(2, 80, 16)] if machine.tiny else [(16, 8192, 16), (16, 8192, 64), (64, 8192, 16)]
    for shape in shapes:
        found = []
        for tuning in grid[:1] if machine.tiny else grid:
            DECODE.TUNING = tuning
            try:
                row = time_decode(machine, *shape, bandwidth, ["scores"])[0]
            except Exception as failure:  # a tile that does not fit the device is a result of the sweep
                row = {"ms": FAR, "failure": repr(failure)[:200]}
            found.append({"shape": shape, "tuning": tuning._asdict(), **row})
        DECODE.TUNING = usual
        for row in sorted(found, key=lambda r: r["ms"])[:5]:
            print("sweep", shape, row["tuning"], f"{row['ms']:.3f} ms {row.get('share_of_copy', 0):.1%}", flush=True)
        rows += found
    return rows


def time_prefill(machine: Machine, n: int) -> Row:
    heads, kv_heads, dim = (4, 2, 32) if machine.tiny else (HEADS, KV_HEADS, DIM)
    device, scale = machine.device, dim**-0.5
    q = torch.randn(heads, n, dim, device=device).bfloat16()
    k, v = (torch.randn(kv_heads, n, dim, device=device).bfloat16() for _ in range(2))
    q_pos = ints(range(n), device)

    def torch_flash() -> Tensor:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True)

    row: Row = {"rows": n}
    row["ms"] = machine.ms(lambda: gpu.prefill(q, k, v, q_pos, scale=scale))
    row["ms_with_sums"] = machine.ms(lambda: gpu.prefill(q, k, v, q_pos, scale=scale, colsum=Reduce.MEAN))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if machine.cuda else SDPBackend.MATH):
        row["ms_torch"] = machine.ms(torch_flash)
    flop = 4 * heads * dim * n * n / 2
    row["tflop_per_s"], row["tflop_per_s_torch"] = flop / row["ms"] / 1e9, flop / row["ms_torch"] / 1e9
    return row


def run_prefill(machine: Machine) -> list[Row]:
    rows = []
    print("\n  rows  ours ms  with sums  torch flash  TFLOP/s ours, torch")
    for n in (150,) if machine.tiny else (1024, 2048, 4096, 8192, 16384, 32768):
        row = time_prefill(machine, n)
        rows.append(row)
        print(
            f"{n:6} {row['ms']:8.3f} {row['ms_with_sums']:10.3f} {row['ms_torch']:12.3f} "
            f"{row['tflop_per_s']:8.1f} {row['tflop_per_s_torch']:6.1f}",
            flush=True,
        )
    return rows


SECTIONS: dict[str, Callable[[Machine], list[Row]]] = {
    "check": run_check, "graph": run_graph, "decode": run_decode, "prefill": run_prefill,
    "codes": run_codes, "sweep": run_sweep,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    parser.add_argument("--interpret", action="store_true", help="run on the CPU in the interpreter of Triton")
    parser.add_argument("--tiny", action="store_true", help="the smallest shapes")
    options = parser.parse_args()
    machine = Machine(options.interpret, options.tiny)
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine.describe()}
    print(report["machine"])
    failed = False
    for name in options.only.split(","):
        begin = time.perf_counter()
        report[name] = SECTIONS[name](machine)
        report.setdefault("seconds", {})[name] = round(time.perf_counter() - begin, 1)
        failed = failed or any(row.get("ok") is False for row in report[name])
        (options.out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\nseconds by section:", report["seconds"], "FAILED" if failed else "all checks passed")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
