"""CPU time of encoding and decoding a layer's tokens in the codec `transform`, beside that of the products in it.

    python benchmarks/performance/storage_kernels.py --threads 1 --json storage-kernels.json

Layers are random; their bits fall linearly, so that 1.5 bits a number are left and about half of the dimensions have
none, as calibrated models have it. The bound is that of one matrix product of torch in float32 over the dimensions with
bits, timed in the same rounds; shares are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from time import process_time

import torch
from script import interval, keep
from torch import Tensor

from millpond.codec.transform.coding import decode, encode, project
from millpond.codec.transform.fit import SideTransform
from millpond.codec.transform.page import TOKENS, PageAddress
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader, Sides
from millpond.kernels import native

AT = PageAddress(0, 0)
#: Bits of the first dimension, and the share of dimensions that have some, of keys and of values.
FALL = ((4.85, 0.40), (6.15, 0.66))


def side_of(d: int) -> SideTransform:
    levels = tuple(torch.linspace(-2, 2, 1 << bits) for bits in range(1, 8))
    matrices = [(torch.randn(d, d) / d**0.5).bfloat16().float() for _ in range(2)]
    return SideTransform(torch.randn(d), *matrices, torch.ones(d, 8), levels)


def header_of(d: int) -> LayerHeader:
    parts = []
    for most, share in FALL:
        bits = (most * (1 - torch.arange(d) / (share * d))).clamp(min=0).round().byte()
        parts.append(SideHeader(torch.randn(d).half().float(), torch.ones(d), bits))
    return LayerHeader(*parts)


def seconds(call: Callable[[], object], least: float = 0.02) -> float:
    """CPU seconds of one call, over as many as take `least`."""
    calls, begun = 0, process_time()
    while (taken := process_time() - begun) < least or not calls:
        call()
        calls += 1
    return taken / calls


def row_of(d: int, pages: int, rounds: int) -> dict[str, object]:
    layer: Sides = (side_of(d), side_of(d))
    header, n = header_of(d), pages * TOKENS
    x = [torch.randn(n, d).bfloat16() for _ in range(2)]

    def coded() -> Tensor:
        z = (project(layer[0], x[0]), project(layer[1], x[1]))
        return encode(layer, header, z, AT)

    stored = coded()
    products = []
    for side, part in zip(layer, header, strict=True):
        chosen = (part.bits > 0).nonzero()[:, 0]
        products.append((torch.randn(n, len(chosen)), side.columns[chosen].contiguous(), torch.empty(n, d)))
    calls: dict[str, Callable[[], object]] = {
        "decode": lambda: decode(layer, header, stored, AT, torch.bfloat16),
        "encode": coded,
        "products": lambda: [torch.mm(z, matrix, out=out) for z, matrix, out in products],
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for nth in range(-1, rounds):
        for name, call in calls.items():
            taken = seconds(call)
            if nth >= 0:
                times[name].append(taken)
    shares = [bound / own for bound, own in zip(times["products"], times["decode"], strict=True)]
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "d": d,
        "tokens": n,
        "columns_with_bits": [int((part.bits > 0).sum()) for part in header],
        "bits_a_number": float(header.bits.sum()) / (2 * d),
        "decode_gb_s": 2 * n * d * 2 / medians["decode"] / 1e9,
        "share_of_products": statistics.median(shares),
        "interval": interval(shares),
        "us_per_32_tokens": {name: taken / pages * 1e6 for name, taken in medians.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[192, 1024])
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 8, 128])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results = []
    for d in args.dims:
        for pages in args.pages:
            row = row_of(d, pages, args.rounds)
            results.append(row)
            print(
                f"d {d}, {row['tokens']} tokens, {native.isa()}: decode {row['decode_gb_s']:.2f} GB/s of bf16, "
                f"{row['share_of_products']:.2f} of the products' speed; us for 32 tokens: "
                + ", ".join(f"{name} {taken:.1f}" for name, taken in row["us_per_32_tokens"].items()),  # type: ignore[attr-defined]
                flush=True,
            )
    keep(args, results, isa=native.isa())


if __name__ == "__main__":
    main()
