"""How fast the ops of one layer are on a CUDA GPU: cells of run_all.py, and sections of gpu_check.py."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_codes import CODECS, PLAIN_PAGES, TUNINGS, time_codec, time_tuning
from gpu_machine import FAR, Layer, Machine, ints
from gpu_rows import Cell, Row
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from millpond.kernels import gpu
from millpond.kernels.args import AttentionShape, DecodeArgs, PrefillArgs, StepRegions
from millpond.kernels.decode_rules import KEEP_ALL, DecodeRule, Evict, Reduce, Signal

DECODE: Any = importlib.import_module("millpond.kernels.gpu.decode")  # the package shows the function under this name

HEADS, KV_HEADS, DIM = 32, 8, 128
WORKING_SET = 2**30  # bytes that timed calls rotate through: 20 times the second-level cache of an H200


@cache
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


def time_decode(machine: Machine, batch: int, stored: int, slots: int, rules: Sequence[str]) -> list[Row]:
    """Steps of one layer under each rule, and their share of the bandwidth of a copy."""
    device, heads, dim = machine.device, (2 if machine.tiny else KV_HEADS), (32 if machine.tiny else DIM)
    group, regions = HEADS // KV_HEADS, batch * heads
    n_bytes = regions * stored * 2 * dim * 2
    copies = 1 if machine.tiny else -(-WORKING_SET // n_bytes)
    start = [stored - 16] * regions  # room for what the timed calls append, in the same number of pages
    layers = [Layer(machine, torch.bfloat16, (dim, dim), slots, regions, stored, start, seed=n) for n in range(copies)]
    q = torch.randn(batch, heads * group, dim, device=device).bfloat16()
    k, v = (torch.randn(batch, heads, dim, device=device).bfloat16() for _ in range(2))
    recent, q_pos = ints([32] * regions, device), ints([stored] * batch, device)
    rows = []
    for name in rules:
        caps = ints([stored - 16 if "evict" in name else 2**30] * regions, device)

        def step(rule: DecodeRule = VARIANTS[name], caps: Tensor = caps) -> None:
            for layer in layers:
                plain, shape = layer.regions, AttentionShape(dim**-0.5)
                gpu.decode(DecodeArgs(q, k, v, StepRegions(plain, caps, recent, q_pos, rule, shape)))

        def reset() -> None:
            for layer in layers:
                layer.lens.fill_(stored - 16)

        replay = machine.graphed(step)
        ms = machine.ms(replay, reset) / copies
        eager = machine.ms(step, reset) / copies
        rate = n_bytes / ms / 1e6
        rows.append(
            {
                "batch": batch,
                "stored": stored,
                "page": slots,
                "rule": name,
                "ms": ms,
                "ms_without_graph": eager,
                "gb_per_s": rate,
                "share_of_copy": rate / copy_gb_per_s(machine),
            }
        )
    return rows


def run_decode(machine: Machine) -> list[Row]:
    bandwidth = copy_gb_per_s(machine)
    print(f"copy bandwidth {bandwidth:.0f} GB/s (read + write)")
    print("\n batch stored  page  rule              ms   eager  share")
    rows: list[Row] = [{"copy_gb_per_s": bandwidth}]
    grid = itertools.product((16, 64), (4096, 8192, 16384, 32768), (16, 32, 64, 256))
    for batch, stored, slots in [(2, 80, 16)] if machine.tiny else grid:
        for row in time_decode(machine, batch, stored, slots, list(VARIANTS)):
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
    rows = []
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
                row = time_decode(machine, *shape, ["scores"])[0]
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
    args = PrefillArgs(q, k, v, q_pos, AttentionShape(scale))
    row["ms"] = machine.ms(lambda: gpu.prefill(args))
    row["ms_with_sums"] = machine.ms(lambda: gpu.prefill(replace(args, colsum=Reduce.MEAN)))
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


def kernel_cells(machine: Machine) -> list[Cell]:
    """Decoding of one layer under each rule, causal attention, and decoding over codes."""
    decode = [(2, 80)] if machine.tiny else [(16, 8192), (64, 8192), (16, 32_768)]
    prefill = [150] if machine.tiny else [2048, 8192, 32_768]
    codecs = (PLAIN_PAGES, "int4") if machine.tiny else (PLAIN_PAGES, *CODECS)
    tunings = itertools.product(("int4",) if machine.tiny else (PLAIN_PAGES, "int4", "fp8"), TUNINGS)
    slots = 16 if machine.tiny else 64
    section = "kernels"

    def decoded(batch: int, stored: int, rule: str) -> Row:
        return time_decode(machine, batch, stored, slots, [rule])[0]

    return [
        *(
            Cell(section, f"decode {rule}, {batch} x {stored}", partial(decoded, batch, stored, rule), 2.0)
            for batch, stored in decode
            for rule in VARIANTS
        ),
        *(Cell(section, f"prefill, {rows}", partial(time_prefill, machine, rows), 2.0) for rows in prefill),
        *(Cell(section, f"decode codes, {codec}", partial(time_codec, machine, codec), 4.0) for codec in codecs),
        *(
            Cell(section, f"tune codes, {codec}, {tuning}", partial(time_tuning, machine, codec, tuning), 2.0)
            for codec, tuning in tunings
        ),
    ]
