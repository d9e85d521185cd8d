"""The codec `transform` on one layer of the 8B shape: gigabytes of bf16 a second that are coded, and decoded.

A number has 1.5 bits in the mean, in a transform that is fitted to random tokens whose variance falls as that of keys.
`encode` and `decode` are what a text that waits passes through, pages on the host and checksums among it; `kernel` is
the decoding kernel alone, over pages on the device. The bound is the slower one of two: to read and write the bytes
once at the bandwidth of a copy, and the products with the transform at the rate of one in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from gpu_bench import Bench
from gpu_rows import Cell, Row
from torch import Tensor

from millpond.codec.transform.coding import decode, encode_tokens
from millpond.codec.transform.fit import SideTransform, fit_side
from millpond.codec.transform.page import PageAddress, page_bytes
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader, Sides, plain_headers
from millpond.kernels.transform_args import BackTransform, CodedDimensions

#: Bits of a number, tokens that are coded together, and channels of all KV heads of a token.
BITS, TOKENS, CHANNELS = 1.5, 8192, 1024
#: Each next dimension has so much of the variance of the one before.
DECAY = 0.99
WHERE = PageAddress(1, 0)


class Coded(NamedTuple):
    """A layer's transform on the device, a header, tokens (n, d) of keys and of values, and their pages."""

    layer: Sides
    header: LayerHeader
    tokens: tuple[Tensor, Tensor]
    pages: Tensor


class StorageBench:
    """The codec's layer and the device's rate of products in float32, made when the first cell needs them.

    Args:
        bench: where, and the rates.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    @cached_property
    def coded(self) -> Coded:
        """Random tokens, coded by torch on the CPU."""
        tiny, device = self.bench.machine.tiny, self.bench.machine.device
        n, d = (64, 64) if tiny else (TOKENS, CHANNELS)
        (key, keys), (value, values) = (fitted(n, d, seed) for seed in range(2))
        layer: Sides = (key, value)
        (header,) = plain_headers([layer], BITS)
        pages = encode_tokens(layer, header, (keys, values), WHERE)
        there = LayerHeader(*(SideHeader(*(t.to(device) for t in (p.mean, p.scale, p.bits))) for p in header))
        tokens = keys.to(device), values.to(device)
        return Coded((key.to(device), value.to(device)), there, tokens, pages)

    @cached_property
    def float32_flop_per_s(self) -> float:
        """Of a product in float32 proper."""
        machine, side = self.bench.machine, 64 if self.bench.machine.tiny else 4096
        a, b = (torch.randn(side, side, device=machine.device) for _ in range(2))
        return 2 * side**3 / machine.ms(lambda: a @ b) * 1e3

    def row(self, ms: float) -> Row:
        """What was reached, and the bound."""
        coded = self.coded
        n, d = coded.tokens[0].shape
        out = 2 * n * d * 2
        dimensions = int((coded.header.bits > 0).sum())
        moved_s = (out + coded.pages.numel()) / self.bench.rates.copy_bytes_per_s
        product_s = 2.0 * n * dimensions * d / self.float32_flop_per_s
        bound = out / max(moved_s, product_s) / 1e9
        rate = out / ms / 1e6
        return {
            "tokens": n,
            "bits": BITS,
            "page_bytes": page_bytes(coded.header.bits),
            "ms": ms,
            "gb_per_s": rate,
            "bound_gb_per_s": bound,
            "bound_of": "bytes" if moved_s > product_s else "products in float32",
            "ratio": bound / rate,
        }


def fitted(n: int, d: int, seed: int) -> tuple[SideTransform, Tensor]:
    """A transform and the tokens (n, d) that it is fitted to."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
    deviations = DECAY ** (torch.arange(d) * (CHANNELS / d) / 2)
    samples = (torch.randn(n, d, generator=generator) * deviations) @ turn
    covariance = (turn.T * deviations.square()) @ turn
    return fit_side(torch.eye(d), torch.zeros(d), covariance, samples, 0.1), samples


def storage_cells(bench: Bench) -> list[Cell]:
    """Encoding, decoding, and the kernel of decoding."""
    storage = StorageBench(bench)
    name = f"{BITS:g} bits"
    runs = {"decode": decoded, "encode": encoded, "kernel of decode": decoded_by_kernel}
    return [Cell("storage", f"{kind}, {name}", partial(run, storage), 8.0) for kind, run in runs.items()]


def encoded(storage: StorageBench) -> Row:
    """Tokens on the device to pages on the host."""
    layer, header, tokens, pages = storage.coded
    found = encode_tokens(layer, header, tokens, WHERE)
    equal = float((found == pages).float().mean())
    ms = storage.bench.machine.ms(lambda: encode_tokens(layer, header, tokens, WHERE))
    return storage.row(ms) | {"same_bytes": equal}


def decoded(storage: StorageBench) -> Row:
    """Pages on the host, their checksums compared, to tokens in bf16 on the device."""
    layer, header, tokens, pages = storage.coded
    return timed_decode(storage, lambda: decode(layer, header, pages, WHERE, torch.bfloat16), tokens)


def decoded_by_kernel(storage: StorageBench) -> Row:
    """Pages on the device to tokens, without checksums."""
    from millpond.kernels import gpu

    layer, header, tokens, pages = storage.coded
    key, value = (
        BackTransform(
            CodedDimensions(part.mean, part.scale, part.bits, torch.cat(side.levels)[None]), side.mean, side.columns
        )
        for side, part in zip(layer, header, strict=True)
    )
    there = pages.to(storage.bench.machine.device)
    return timed_decode(storage, lambda: gpu.decode_pages((key, value), there, torch.bfloat16), tokens)


def timed_decode(storage: StorageBench, run: Callable[[], Any], tokens: tuple[Tensor, Tensor]) -> Row:
    """How long decoding takes, and how far from the tokens its numbers are."""
    errors = [
        float((found.float() - x).square().mean() / x.square().mean()) for found, x in zip(run(), tokens, strict=True)
    ]
    return storage.row(storage.bench.machine.ms(run)) | {"squared_error": max(errors)}
