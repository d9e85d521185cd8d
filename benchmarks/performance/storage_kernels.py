"""CPU time of encoding and decoding a layer's tokens in the codec `transform`, beside that of the products in it.

    python benchmarks/performance/storage_kernels.py --model smollm2-135m --json storage-kernels.json

Layers are random; their bits fall linearly, so that 1.5 bits a number are left and about half of the dimensions have
none, as calibrated models have it. The bound is that of one matrix product of torch in float32 over the dimensions with
bits, timed in the same rounds; shares are medians over rounds. Encoding is that of a layer whose bits are known,
as in a prefix tree. With a model, reading a prompt of random tokens is timed too, for 32 tokens of a layer; and the
attention that an engine samples to find exact tokens, as a share of the CPU seconds of reading the prompt without it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import torch
from script import interval, keep
from torch import Tensor

import millpond as mp
from millpond.cache.state.attention_samples import LayerSamples
from millpond.codec.transform.coding import decode, encode_tokens
from millpond.codec.transform.fit import SideTransform
from millpond.codec.transform.page import TOKENS, PageAddress
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader, Sides
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.hf.compress import compress
from millpond.kernels import native
from millpond.models.load import load_model

AT = PageAddress(0, 0)
CODEC = "transform:1.5"
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
        return encode_tokens(layer, header, (x[0], x[1]), AT)

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


def reading(name: str, tokens: int = 1024) -> float:
    """CPU seconds of 32 tokens of a layer while the model reads a prompt, the least of three."""
    model, times = load_model(name, "bf16"), []
    ids = torch.randint(model.config.vocab_size, (1, tokens))
    for _ in range(3):
        with torch.inference_mode(), compress(model, "full") as cache:
            begun = process_time()
            model(ids, cache=cache, logits_to_keep=1)
            times.append(process_time() - begun)
    return min(times) / model.config.num_hidden_layers / tokens * TOKENS


def sampling(name: str, tokens: int, rounds: int) -> dict[str, object]:
    """Share of reading a prompt in an engine that finding exact tokens adds to the rest, of each round."""
    engine = Engine(load_model(name, "bf16"), method="full", codec="auto", prefix_cache=False, storage_codec=CODEC)
    once = mp.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    observe, spent, shares = LayerSamples.observe, 0.0, []

    def timed(samples: LayerSamples, *args: Any) -> None:
        nonlocal spent
        begun = process_time()
        observe(samples, *args)
        spent += process_time() - begun

    with patch.object(LayerSamples, "observe", timed):
        for nth in range(-1, rounds):
            ids = torch.randint(engine.vocab_size, (tokens,)).tolist()
            engine.add(Request(request_id=str(nth), prompt=tuple(ids), params=once))
            spent, begun = 0.0, process_time()
            while engine.busy:
                engine.step()
            if nth >= 0:
                shares.append(spent / (process_time() - begun - spent))
    engine.close()
    return {"tokens": tokens, "share_of_reading": statistics.median(shares), "interval": interval(shares)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[192, 1024])
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 8, 128])
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 4096], help="Tokens of sampled prompts.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--model", help="A model whose reading is timed.")
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
    more: dict[str, object] = {"isa": native.isa()}
    if args.model is not None:
        taken = reading(args.model) * 1e6
        more["reading_us_per_32_tokens_of_a_layer"] = taken
        print(f"{args.model} reads 32 tokens in {taken:.0f} us a layer")
        more["sampling"] = sampled = [sampling(args.model, tokens, args.rounds) for tokens in args.prompts]
        for row in sampled:
            print(f"sampling {row['tokens']} tokens adds {row['share_of_reading']:.2%} to reading them")
    keep(args, results, **more)


if __name__ == "__main__":
    main()
