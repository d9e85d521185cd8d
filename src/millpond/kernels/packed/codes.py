"""Codes of one side of a page, keys or values, in plain torch: bits in words, scales, zeros and outliers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from millpond.kernels.packed import groups
from millpond.kernels.packed.groups import Groups, to_half
from millpond.kernels.packed.layout import (
    LANES,
    MAX_NAMED,
    Format,
    Offsets,
    PackedLayout,
    Side,
    cuts_of,
    groups_of,
    table_of,
)


def split(x: Tensor, axis: int, size: int) -> Tensor:
    """Return `x` with axis `axis` as two, the second of `size`."""
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def pack(codes: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Return codes (..., depth, 16) int64 as words (..., n, 16) int32, third bits apart."""
    if bits == 3:
        return _pack(codes & 3, 2), _pack(codes >> 2, 1)
    return _pack(codes, bits), None


def unpack(words: Tensor, top: Tensor | None, bits: int, depth: int) -> Tensor:
    """Return the codes (..., depth, 16) int64 that `pack` put into words."""
    if top is not None:
        return _unpack(words, 2)[..., :depth, :] | _unpack(top, 1)[..., :depth, :] << 2
    return _unpack(words, bits)[..., :depth, :]


def _shifts(bits: int, device: torch.device) -> Tensor:
    e = torch.arange(32 // bits, device=device)
    return (bits * (e // 2) + 16 * (e % 2))[:, None]


def _pack(codes: Tensor, bits: int) -> Tensor:
    per = 32 // bits
    depth = codes.shape[-2]
    codes = torch.nn.functional.pad(codes, (0, 0, 0, -depth % per))
    words = (split(codes, -2, per) << _shifts(bits, codes.device)).sum(-2)
    return ((words + 2**31) % 2**32 - 2**31).int()


def _unpack(words: Tensor, bits: int) -> Tensor:
    wide = words.long()[..., None, :] >> _shifts(bits, words.device)
    return (wide & ((1 << bits) - 1)).flatten(-3, -2)


def key_lanes(x: Tensor) -> Tensor:
    """Return (..., slots, dim) -> (..., slots / 16, dim, 16): lanes are slots."""
    return split(x, -2, LANES).transpose(-1, -2)


def from_key_lanes(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).flatten(-3, -2)


def value_lanes(x: Tensor) -> Tensor:
    """Return (..., slots, dim) -> (..., dim / 16, slots, 16): lanes are channels."""
    return split(x, -1, LANES).transpose(-3, -2)


def from_value_lanes(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2, -1)


def inliers(x: Tensor, side: Side, fixed: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return (P, slots, dim) bool: all but the farthest `side.n_extra` numbers of each page.

    Of equal ones the first are outliers. Distance is measured from the middle of the calibrated range of the channel,
    in units of it, or else from the mean of the number's group, in standard deviations.
    """
    tiny = torch.finfo(torch.float32).tiny
    if fixed is not None:
        scale, zero = fixed
        middle = zero if side.format.uses_table else zero + scale * ((1 << side.format.bits) - 1) / 2
        far = ((x - middle) / scale.clamp(min=tiny)).abs()
    else:
        grouped = split(x, 1, side.group) if side.by_channel else split(x, 2, x.shape[2] // groups_of(side, x.shape[2]))
        n = grouped.shape[2 if side.by_channel else 3]
        away = (grouped - _sum(grouped, side.by_channel) / n).abs()
        # by way of float64: torch's root of float32 is not always the nearest number
        spread = (_sum(away.square(), side.by_channel) / n).double().sqrt().float()
        far = (away / spread.clamp(min=tiny)).reshape(x.shape)
    indices = far.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, : side.n_extra]
    return torch.ones_like(far, dtype=torch.bool).flatten(1).scatter(1, indices, False).view_as(far)


def _sum(grouped: Tensor, by_channel: bool) -> Tensor:
    """Return sums of groups in an order that native code repeats.

    By channel it is slot after slot, (P, n, 1, dim) of (P, n, slots, dim); else 16 channels after 16 and then half onto
    half, (P, slots, n, 1) of (P, slots, n, channels).
    """
    if by_channel:
        return reduce(torch.add, grouped.unbind(2)).unsqueeze(2)
    lanes = reduce(torch.add, split(grouped, 3, LANES).unbind(3))
    while lanes.shape[3] > 1:
        half = lanes.shape[3] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes


def beside(rest: Tensor, inlier: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return (where, what) (P, n): places of the n outliers of each page, and remainders.

    Places ascend; a remainder is what the code of an outlier lacks.

    Raises:
        NumericsError: one lacks more than float16 holds.
    """
    places = (~inlier).flatten(1).nonzero()[:, 1].view(rest.shape[0], n)
    slot, channel = places // rest.shape[2], places % rest.shape[2]
    return slot * MAX_NAMED + channel, to_half(rest.flatten(1).gather(1, places))


def add(x: Tensor, where: Tensor, what: Tensor) -> Tensor:
    """Return x (P, slots, dim) with the outliers added."""
    places = where // MAX_NAMED * x.shape[2] + where % MAX_NAMED
    return x.flatten(1).scatter_add(1, places, what.float()).view_as(x)


#: Scales and zeros (dim,) float32 per channel that calibration made, for a side that is `fixed`.
Fixed = tuple[Tensor, Tensor]


@dataclass
class Parts:
    """Keys or values of P pages.

    Attributes:
        codes: (P, slots, dim) int64, or (P, slots, dim) bfloat16 where the format is `Format.ROWS`.
        scales: By channel (P, slots / group, dim), otherwise (P, slots, groups), one (P, 1) for e4m3; or None.
        zeros: Shaped like `scales`; or None.
        means: (P, dim) float16, means of the numbers in each channel if codes stand for the numbers less them; or None.
        where: (P, n_extra) places of the outliers: slot * 256 + channel.
        what: (P, n_extra) remainders of the outliers in float16.
    """

    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    means: Tensor | None = None
    where: Tensor | None = None
    what: Tensor | None = None


def _grouped(x: Tensor, side: Side) -> Tensor:
    """Return (P, slots, dim) with the members of a group last."""
    if side.format is Format.FP8:
        return x.flatten(1)[:, None]  # (P, 1, slots * dim)
    if side.by_channel:
        return split(x, 1, side.group).transpose(-1, -2)  # (P, slots / group, dim, group)
    return split(x, 2, x.shape[2] // groups_of(side, x.shape[2]))  # (P, slots, groups, group)


def _ungrouped(x: Tensor, side: Side, dim: int) -> Tensor:
    if side.format is Format.FP8:
        return x.reshape(x.shape[0], -1, dim)
    return x.transpose(-1, -2).flatten(1, 2) if side.by_channel else x.flatten(2, 3)


def encode(x: Tensor, side: Side, fixed: Fixed | None = None) -> Parts:
    """Return the codes of P runs of slots x (P, slots, dim).

    Raises:
        NumericsError: a number that the format cannot hold.
    """
    if side.format is Format.ROWS:
        return Parts(x.bfloat16())
    x = x.float() + 0.0  # zeros lose their signs: equal numbers have equal codes
    inlier = means = None
    if side.n_extra or side.less_mean:
        groups.check_finite(x)
    if side.less_mean:
        means = groups.to_half(_means(x))
        x = x - means.float()[:, None]
    if side.n_extra:
        inlier = inliers(x, side, fixed)
    if fixed is not None:
        groups.check_finite(x)
        scale, zero = fixed
        y = (x - zero) * groups.inverse(scale)
        codes = groups.between(y, cuts_of(side).to(y.device)) if side.format.uses_table else _whole(y, side.format.bits)
        parts = Parts(codes)
    else:
        encoded = _encode_groups(_grouped(x, side), side, None if inlier is None else _grouped(inlier, side))
        parts = Parts(_ungrouped(encoded.codes, side, x.shape[-1]), encoded.scales, encoded.zeros)
    if inlier is not None:
        parts.where, parts.what = beside(x - decode(parts, side, fixed), inlier, side.n_extra)
    parts.means = means
    return parts


def _means(x: Tensor) -> Tensor:
    """Return means (P, dim) over the slots of x (P, slots, dim).

    They are added slot after slot as in every implementation.
    """
    total = x[:, 0]
    for slot in range(1, x.shape[1]):
        total = total + x[:, slot]
    return total * (1.0 / x.shape[1])


def _whole(y: Tensor, bits: int) -> Tensor:
    return torch.round(y).clamp(0, (1 << bits) - 1).long()


def _encode_groups(x: Tensor, side: Side, inlier: Tensor | None) -> Groups:
    if side.format is Format.FP8:
        return groups.encode_e4m3(x)
    if side.format.uses_table:
        return groups.encode_table(x, cuts_of(side).to(x.device), inlier)
    return groups.encode_affine(x, side.format.bits, side.symmetric, inlier)


def decode(parts: Parts, side: Side, fixed: Fixed | None = None) -> Tensor:
    """Return the numbers (P, slots, dim) float32 that the codes stand for."""
    if side.format is Format.ROWS:
        return parts.codes.float()
    if fixed is not None:
        scale, zero = fixed
        codes = table_of(side).to(scale.device)[parts.codes] if side.format.uses_table else parts.codes.float()
        x = codes * scale + zero
    else:
        assert parts.scales is not None
        grouped = Groups(_grouped(parts.codes, side), parts.scales, parts.zeros)
        x = _ungrouped(_decode_groups(grouped, side), side, parts.codes.shape[-1])
    if parts.means is not None:
        x = x + parts.means.float()[:, None]
    if parts.where is not None and parts.what is not None:
        x = add(x, parts.where, parts.what)
    return x


def _decode_groups(grouped: Groups, side: Side) -> Tensor:
    if side.format is Format.FP8:
        return groups.decode_e4m3(grouped)
    if side.format.uses_table:
        return groups.decode_table(grouped, table_of(side).to(grouped.codes.device))
    return groups.decode_affine(grouped, side.format.bits)


# ----------------------------------------------------------------------------------------------- bytes


def to_bytes(parts: Parts, side: Side, is_key: bool) -> Tensor:
    """Return (P, n) uint8: the bytes of one side of P whole pages, in the order of `Offsets`."""
    if side.format is Format.ROWS:
        return _bytes(parts.codes)
    lanes = key_lanes(parts.codes) if is_key else value_lanes(parts.codes)
    words, top = pack(lanes, side.format.bits)
    pieces = [_bytes(words), *([] if top is None else [_bytes(top)])]
    for t in (parts.scales, parts.zeros):
        if t is not None:
            slotwise = not side.by_channel and side.format is not Format.FP8
            pieces.append(_bytes(t.transpose(1, 2) if slotwise else t))
    if parts.means is not None:
        pieces.append(_bytes(parts.means))
    if parts.where is not None and parts.what is not None:
        pieces += [_bytes(parts.where.to(torch.int32).to(torch.int16)), _bytes(parts.what)]
    return torch.cat(pieces, 1)


def from_bytes(page: Tensor, side: Side, at: Offsets, slots: int, dim: int, is_key: bool) -> Parts:
    """Return one side of P whole pages (P, page_bytes) uint8."""
    n = page.shape[0]

    def take(begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return page[:, begin : begin + count].contiguous().view(dtype).reshape(n, *shape)

    if side.format is Format.ROWS:
        return Parts(take(at.codes, (slots, dim), torch.bfloat16))
    count, depth = (slots // 16, dim) if is_key else (dim // 16, slots)
    bits = side.format.bits
    words = take(at.codes, (count, depth * (2 if bits == 3 else bits) // 32, 16), torch.int32)
    top = take(at.top, (count, -(-depth // 32), 16), torch.int32) if at.top >= 0 else None
    lanes = unpack(words, top, bits, depth)
    parts = Parts(from_key_lanes(lanes) if is_key else from_value_lanes(lanes))
    if side.format is Format.FP8:
        parts.scales = take(at.scales, (1,), torch.float32)
    elif at.scales >= 0:
        shape = (slots // side.group, dim) if side.by_channel else (groups_of(side, dim), slots)
        scales, zeros = (take(begin, shape, torch.float16) if begin >= 0 else None for begin in (at.scales, at.zeros))
        if not side.by_channel:
            scales, zeros = (t if t is None else t.transpose(1, 2) for t in (scales, zeros))
        parts.scales, parts.zeros = scales, zeros
    if at.means >= 0:
        parts.means = take(at.means, (dim,), torch.float16)
    if side.n_extra:
        parts.where = take(at.extra, (side.n_extra,), torch.int16).long() & 0xFFFF
        parts.what = take(at.extra + 2 * side.n_extra, (side.n_extra,), torch.float16)
    return parts


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten(1).view(torch.uint8)


def replace_slots(old: Parts, new: Parts, side: Side, first: int) -> Parts:
    """Return parts of one page with slots from `first` on replaced by `new` (1, n, dim)."""
    n = new.codes.shape[1]
    codes = old.codes.clone()
    codes[:, first : first + n] = new.codes
    out = Parts(codes, means=new.means, where=new.where, what=new.what)
    per = side.group if side.by_channel else 1
    for name in ("scales", "zeros"):
        before, after = getattr(old, name), getattr(new, name)
        if before is None:
            continue
        if side.format is not Format.FP8:
            merged = before.clone()
            merged[:, first // per : (first + n) // per] = after
            after = merged
        setattr(out, name, after)
    return out


def sides(layout: PackedLayout) -> tuple[tuple[Side, Offsets, int, bool], tuple[Side, Offsets, int, bool]]:
    """Return (side, offsets, dim, whether it is the keys) of keys and values."""
    return (
        (layout.key, layout.key_offsets, layout.key_dim, True),
        (layout.value, layout.value_offsets, layout.value_dim, False),
    )
