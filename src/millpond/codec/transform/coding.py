"""Encoding and decoding of a layer's tokens: transform, levels and pages; the reference that native code follows."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.codec.transform.fit import SideTransform
from millpond.codec.transform.levels import cuts_of
from millpond.codec.transform.ordered_sums import ordered_product
from millpond.codec.transform.page import PageAddress, pack_pages, unpack_pages
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader, Sides


def project(side: SideTransform, x: Tensor) -> Tensor:
    """Return z = rows (x - mean) of tokens, (n, r) float32.

    The sum runs over the channels in their order, each product and sum rounded to float32.

    Args:
        side: Transform.
        x: (n, d) keys before RoPE or values, all KV heads of a token side by side.
    """
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
    codes = [_codes(side, part, numbers) for side, part, numbers in zip(layer, header, z, strict=True)]
    return pack_pages(torch.cat(codes, 1), header.bits, address)


def decode(layer: Sides, header: LayerHeader, pages: Tensor, address: PageAddress) -> tuple[Tensor, Tensor]:
    """Return the tokens of pages: keys before RoPE and values, (32 P, d) float32 each.

    A dimension with bits is s q + m, with two roundings. The sum begins at the mean, adds the columns without bits
    times m in their order, and then those with bits times their numbers in theirs.

    Args:
        layer: Transforms of keys and values.
        header: Means, scales and bits that the pages were written with.
        pages: (P, bytes) uint8.
        address: Where they belong.

    Raises:
        DataError: a page has another size, is damaged, or belongs elsewhere.
    """
    codes = unpack_pages(pages, header.bits, address)
    split = torch.split(codes, [len(header.key.bits), len(header.value.bits)], 1)
    keys, values = (_numbers(side, part, of) for side, part, of in zip(layer, header, split, strict=True))
    return keys, values


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
