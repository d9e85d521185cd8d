"""Encoding and decoding of a layer's tokens: transform, levels and pages, by native kernels or in torch.

Each sum has one order: z and x^ are chains over channels or dimensions in turn. Native kernels fuse a product with its
sum, so that all of their builds give equal bits; torch rounds both, and differs by 1e-5 of the largest term at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.codec.transform.fit import SideTransform
from millpond.codec.transform.levels import cuts_of
from millpond.codec.transform.ordered_sums import ordered_product
from millpond.codec.transform.page import (
    TOKENS,
    PageAddress,
    check_pages,
    pack_pages,
    page_bytes,
    seal_pages,
    unpack_pages,
)
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader, Sides
from millpond.kernels.backends import gpu_for, native_for
from millpond.kernels.native import transform as native
from millpond.kernels.transform_args import BackTransform, CodedDimensions


def project(side: SideTransform, x: Tensor, bits: Tensor | None = None) -> Tensor:
    """Return z = rows (x - mean) of tokens, (n, r) float32.

    The sum runs over the channels in their order.

    Args:
        side: Transform.
        x: (n, d) keys before RoPE or values, all KV heads of a token side by side.
        bits: Bits of a header that is known, (r,) uint8: dimensions without any are not computed, and 0.
    """
    if native_for(torch.float32, x.device) is not None:
        return native.project(x, side.mean.contiguous(), side.rows.contiguous(), bits)
    kernels = gpu_for(torch.float32, x.device)
    if kernels is not None:
        z = x.new_zeros((len(x), side.n_rows), dtype=torch.float32)
        rows = torch.arange(side.n_rows, device=x.device) if bits is None else bits.nonzero()[:, 0]
        z[:, rows] = kernels.project(x, side.mean.contiguous(), side.rows.contiguous(), rows)
        return z
    if bits is not None:
        coded = (bits > 0).nonzero()[:, 0]
        z = x.new_zeros((len(x), side.n_rows), dtype=torch.float32)
        z[:, coded] = ordered_product(x.float() - side.mean, side.rows[coded].T.contiguous())
        return z
    return ordered_product(x.float() - side.mean, side.rows.T.contiguous())


def encode(layer: Sides, header: LayerHeader, z: tuple[Tensor, Tensor], address: PageAddress) -> Tensor:
    """Return the pages of some tokens of a layer.

    A code is the number of cuts below (z - m) / s, two roundings; cuts lie halfway between levels.

    Args:
        layer: Transforms of keys and values.
        header: Means, scales and bits.
        z: Projected keys and values, (32 P, r) float32 each.
        address: Where the pages belong.

    Returns:
        (P, bytes) uint8 on the CPU.
    """
    if native_for(torch.float32, z[0].device) is not None:
        key, value = (_coded(side, part) for side, part in zip(layer, header, strict=True))
        return native.encode_pages((key, value), z, page_bytes(header.bits), address)
    if gpu_for(torch.float32, z[0].device) is not None:
        return _encoded(layer, header, z, address)
    codes = [_codes(side, part, numbers) for side, part, numbers in zip(layer, header, z, strict=True)]
    return pack_pages(torch.cat(codes, 1), header.bits, address)


def encode_tokens(layer: Sides, header: LayerHeader, x: tuple[Tensor, Tensor], address: PageAddress) -> Tensor:
    """Return the pages of tokens under a header that is known.

    In one pass, it does what `project` and `encode` do one after the other.

    Args:
        layer: Transforms of keys and values.
        header: Means, scales and bits.
        x: Keys before RoPE and values, (32 P, d) each, all KV heads of a token side by side.
        address: Where the pages belong.

    Returns:
        (P, bytes) uint8 on the CPU.
    """
    kernels = gpu_for(torch.float32, x[0].device)
    if kernels is not None:
        key, value = (
            kernels.project(own, side.mean.contiguous(), side.rows.contiguous(), part.bits.nonzero()[:, 0])
            for side, own, part in zip(layer, x, header, strict=True)
        )
        return _encoded(layer, header, (key, value), address)
    if native_for(torch.float32, x[0].device) is None:
        key, value = (project(*of) for of in zip(layer, x, (part.bits for part in header), strict=True))
        return encode(layer, header, (key, value), address)
    coded = (_coded(layer[0], header.key), _coded(layer[1], header.value))
    keys, values = ((of, side.mean.contiguous(), side.rows.contiguous()) for side, of in zip(layer, x, strict=True))
    return native.encode_tokens(coded, (keys, values), page_bytes(header.bits), address)


def decode(
    layer: Sides, header: LayerHeader, pages: Tensor, address: PageAddress, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return the tokens of pages: keys before RoPE and values, (32 P, d) each.

    A dimension with bits is s q + m, with two roundings. The sum begins at the mean, adds the columns without bits
    times m in their order, and then those with bits times their numbers in theirs.

    Args:
        layer: Transforms of keys and values.
        header: Means, scales and bits that the pages were written with.
        pages: (P, bytes) uint8.
        address: Where they belong.
        dtype: Of the tokens: float32, or what it is rounded to.

    Raises:
        DataError: a page has another size, is damaged, or belongs elsewhere.
    """
    device = layer[0].mean.device
    kernels = native_for(dtype, device) or gpu_for(dtype, device)
    if kernels is not None:
        check_pages(pages, page_bytes(header.bits), address)
        key, value = (
            BackTransform(_coded(side, part), side.mean.contiguous(), side.columns.contiguous())
            for side, part in zip(layer, header, strict=True)
        )
        found: tuple[Tensor, Tensor] = kernels.decode_pages((key, value), pages, dtype)
        return found
    codes = unpack_pages(pages, header.bits, address)
    split = torch.split(codes, [len(header.key.bits), len(header.value.bits)], 1)
    keys, values = (_numbers(side, part, of).to(dtype) for side, part, of in zip(layer, header, split, strict=True))
    return keys, values


def _encoded(layer: Sides, header: LayerHeader, z: tuple[Tensor, Tensor], address: PageAddress) -> Tensor:
    """Return the pages of numbers, by the kernels of a GPU.

    z: see `encode`; of all dimensions, or of those that have bits.
    """
    kernels, (first, _) = gpu_for(torch.float32, z[0].device), z
    assert kernels is not None, "the caller has asked"
    words = [int(part.bits.sum()) for part in header]
    planes = torch.empty((len(first) // TOKENS, sum(words)), dtype=torch.int32, device=first.device)
    for side, part, numbers, before in zip(layer, header, z, (0, words[0]), strict=True):
        cuts = torch.cat([torch.cat([cuts_of(levels), levels[-1:]]) for levels in side.levels])[None]
        coded = CodedDimensions(part.mean.contiguous(), part.scale.contiguous(), part.bits.contiguous(), cuts)
        kernels.encode_planes(numbers, coded, planes, before)
    return seal_pages(planes, address)


def _coded(side: SideTransform, header: SideHeader) -> CodedDimensions:
    levels = torch.cat(side.levels)[None]
    return CodedDimensions(header.mean.contiguous(), header.scale.contiguous(), header.bits.contiguous(), levels)


def _codes(side: SideTransform, header: SideHeader, z: Tensor) -> Tensor:
    u = (z - header.mean) / header.scale
    codes = torch.zeros(z.shape, dtype=torch.uint8, device=z.device)
    for bits, levels in enumerate(side.levels, 1):
        chosen = (header.bits == bits).nonzero()[:, 0]
        if len(chosen):
            codes[:, chosen] = torch.bucketize(u[:, chosen], cuts_of(levels)).to(torch.uint8)
    return codes


def _numbers(side: SideTransform, header: SideHeader, codes: Tensor) -> Tensor:
    coded, constant = (header.bits > 0).nonzero()[:, 0], (header.bits == 0).nonzero()[:, 0]
    start = ordered_product(header.mean[None, constant], side.columns[constant], side.mean)[0]
    z = torch.empty((len(codes), len(coded)), device=codes.device)
    widths = header.bits[coded]
    for bits, levels in enumerate(side.levels, 1):
        chosen = (widths == bits).nonzero()[:, 0]
        if len(chosen):
            z[:, chosen] = levels[codes[:, coded[chosen]].long()]
    z = z * header.scale[coded] + header.mean[coded]
    return ordered_product(z, side.columns[coded], start)
