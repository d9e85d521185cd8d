"""Entries that an evicting cache kept of a text, in codes of the codec `transform`.

A layer whose heads hold the same tokens is one part, in pages of all heads together. Else each KV head is a part of its
own. A part has pages of 32 entries each in the order of their positions, and the entries that stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from millpond.cache.coded.entries import joined, moments, projected
from millpond.cache.types import RotaryEmbedding, by_position
from millpond.codec.transform.coding import encode
from millpond.codec.transform.exact_tokens import NEWEST, SINKS, most_attended
from millpond.codec.transform.page import HEADER, TOKENS, PageAddress
from millpond.codec.transform.prompt_header import LayerHeader, Sides, adapted_headers, header_bytes, plain_headers
from millpond.codec.transform.transform_file import ModelTransform

#: Fewest entries in pages that a header is fitted to.
LEAST_FITTED = 128
#: A header takes at most this share of the bytes of its pages; where it would take more the calibration's is used.
MOST_HEADER = 0.2
#: Which of some entries of a part are exact: of its heads, at these places -> (m,) bool.
_Choose = Callable[[slice, Tensor], Tensor]
#: A header serves until so many times the entries are in pages that it was fitted to.
SERVES = 2


class Kept(NamedTuple):
    """Entries of a layer in ascending positions in each head, behind them nothing.

    Attributes:
        keys: (H, W, D) after RoPE.
        values: (H, W, V).
        positions: (H, W) int64, -1 where a head holds fewer than W.
        lens: Entries of each head.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    lens: tuple[int, ...]

    @classmethod
    def of(cls, stored: Mapping[str, Tensor], device: torch.device) -> Kept:
        """Order the entries of a layer that `millpond.cache.serialization.to_tensors` named."""
        positions = without_rest(stored["positions"], stored["lens"])
        order = by_position(positions)
        keys, values = (
            stored[name].gather(1, order[..., None].expand(stored[name].shape)).to(device)
            for name in ("keys", "values")
        )
        lens = tuple(int(n) for n in stored["lens"])
        return cls(keys, values, positions.gather(1, order).long().to(device), lens)

    @property
    def together(self) -> bool:
        """Whether all heads hold the same tokens."""
        return bool((self.positions == self.positions[:1]).all())


def without_rest(positions: Tensor, lens: Tensor) -> Tensor:
    """Return positions (H, W) with -1 in the slots behind the first `lens` (H,) of each head."""
    return positions.masked_fill(torch.arange(positions.shape[1]) >= lens[:, None], -1)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Entries of all heads of a layer that hold the same tokens, or of one head.

    Attributes:
        sides: Its transforms.
        number: Its number in the addresses of pages: that of the layer, or behind all layers that of the head.
        heads: Heads of the layer.
        rotary: Rotation of the keys; None if they have none.
    """

    sides: Sides
    number: int
    heads: slice
    rotary: RotaryEmbedding | None


def parts_of(transform: ModelTransform, nth: int, rotary: RotaryEmbedding | None, together: bool) -> list[Part]:
    """Return the parts of a layer.

    Raises:
        OptionError: heads hold other tokens each, and the file has no parts for single heads.
    """
    if together:
        return [Part(transform.layers[nth], nth, slice(None), rotary)]
    transform.digest_of_heads()
    shapes = transform.model.shapes
    first = len(shapes) + sum(shape[0] for shape in shapes[:nth])
    return [Part(sides, first + head, slice(head, head + 1), rotary) for head, sides in enumerate(transform.heads[nth])]


def n_coded(n: int) -> int:
    """Return how many of a part's `n` entries are in pages: all but the newest 64 to 95."""
    return max(0, n - NEWEST) // TOKENS * TOKENS


def is_fitted(sides: Sides, n: int, bits: float) -> bool:
    """Whether a part with `n` entries in pages has a header of its own.

    It has where there are enough entries to fit one to, and it takes little beside their pages.
    """
    own = sum(header_bytes(side.n_rows) for side in sides)
    pages = n // TOKENS * (HEADER + bits * TOKENS / 8 * sum(len(side.mean) for side in sides))
    return n >= LEAST_FITTED and own <= MOST_HEADER * pages


class PlainHeaders:
    """Headers of parts that have none of their own.

    They are the calibration's, given to all layers together, and to all heads together.

    Args:
        transform: The model's transform.
        bits: Mean bits a number.

    Raises:
        OptionError: bits out of range.
    """

    def __init__(self, transform: ModelTransform, bits: float) -> None:
        heads = [sides for layer in transform.heads for sides in layer]
        self._headers = plain_headers(transform.layers, bits) + (plain_headers(heads, bits) if heads else [])

    def of(self, part: Part) -> LayerHeader:
        return self._headers[part.number]


@dataclass(frozen=True, slots=True, eq=False)
class CodedPart:
    """Codes of a part, on the CPU.

    Attributes:
        header: Header of its own; None for the calibration's.
        made: Entries in pages when that was fitted.
        pages: (P, bytes) uint8.
        at: (m,) int64: which of its entries in pages are also stored as they are, in the order of positions.
        keys: (m + rest, heads D) of these and of those behind all pages, after RoPE.
        values: (m + rest, heads V).
    """

    header: LayerHeader | None
    made: int
    pages: Tensor
    at: Tensor
    keys: Tensor
    values: Tensor


class FittedHeader(NamedTuple):
    """Header of a part, which serves for more entries.

    Attributes:
        header: The header.
        made: Entries in pages when it was fitted.
    """

    header: LayerHeader
    made: int


class KeptEncoder:
    """Coder of what is kept of one text: first it takes all layers, then it codes them.

    Args:
        transform: The model's transform.
        bits: Mean bits a number in pages, over all parts.
        rotations: Rotation of each layer's keys; None for one without.
        adapt: Whether headers are fitted to the text; else they are the calibration's.
        headers: Headers of earlier codes of this text that its entries were decoded from, by number of their part. They
            serve again, so that the codes of entries that were decoded are the same, and no error is added to theirs.
    """

    def __init__(
        self,
        transform: ModelTransform,
        bits: float,
        rotations: Sequence[RotaryEmbedding | None],
        adapt: bool,
        headers: Mapping[int, FittedHeader] | None = None,
    ) -> None:
        self._transform, self._bits, self._rotations, self._adapt = transform, bits, rotations, adapt
        self._known = headers or {}
        self._layers: list[list[_Projected]] = []

    def add(self, kept: Kept, attention: Tensor) -> None:
        """Take the next layer; one in 100 entries is exact, by its attention.

        Args:
            kept: Its entries.
            attention: (H, W) float32 attention per query of each entry.

        Raises:
            OptionError: heads hold other tokens each, and the file has no parts for single heads, or for fewer bits.
        """
        self._add(kept, lambda heads, middle: most_attended(attention[heads].amax(0)[middle]))

    def add_chosen(self, kept: Kept, positions: Tensor) -> None:
        """Take the next layer, of which tokens at some positions are exact.

        Args:
            kept: Its entries.
            positions: (m,) int64; those that it does not hold count for nothing.

        Raises:
            OptionError: see `add`.
        """
        chosen = torch.isin(kept.positions, positions.to(kept.positions.device))
        self._add(kept, lambda heads, middle: chosen[heads].any(0)[middle])

    def _add(self, kept: Kept, choose: _Choose) -> None:
        if not kept.together:
            self._transform.check_head_bits(self._bits)
        nth = len(self._layers)
        parts = parts_of(self._transform, nth, self._rotations[nth], kept.together)
        self._layers.append([_Projected.of(part, kept, choose) for part in parts])

    def coded(self, unit: int) -> list[list[CodedPart]]:
        """Return the parts of all layers in codes.

        Args:
            unit: Number of the text, in every page.
        """
        every = [one for layer in self._layers for one in layer]
        serving = {
            one.part.number: known
            for one in every
            if (known := self._known.get(one.part.number)) is not None and one.n_coded <= SERVES * known.made
        }
        own = [
            one
            for one in every
            if self._adapt and one.part.number not in serving and is_fitted(one.part.sides, one.n_coded, self._bits)
        ]
        sums = [moments(side, ~one.exact[: one.n_coded]) for one in own for side in one.z]
        sides, tokens = [one.part.sides for one in own], [one.n_coded for one in own]
        fitted = adapted_headers(sides, sums, self._bits, tokens) if own else []
        made = {one.part.number: FittedHeader(header, one.n_coded) for one, header in zip(own, fitted, strict=True)}
        headers, plain = serving | made, PlainHeaders(self._transform, self._bits)
        return [[one.coded(headers.get(one.part.number), plain, unit) for one in layer] for layer in self._layers]


@dataclass(frozen=True, slots=True, eq=False)
class _Projected:
    """Entries of a part, and the numbers of those that go into pages.

    Attributes:
        part: The part.
        keys: (n, heads D), all heads of a token side by side.
        values: (n, heads V).
        exact: (n,) bool: which are stored as they are, on the CPU.
        z: Projected keys and values of the first ones, (32 P, r) each.
    """

    part: Part
    keys: Tensor
    values: Tensor
    exact: Tensor
    z: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, part: Part, kept: Kept, choose: _Choose) -> _Projected:
        n = kept.lens[part.heads][0]
        keys, values = kept.keys[part.heads, :n], kept.values[part.heads, :n]
        positions, end = kept.positions[part.heads, :n][0], n_coded(n)
        z = projected(part.sides, keys[:, :end], values[:, :end], positions[:end], part.rotary)
        exact = _exact(positions, part.heads, choose, end)
        return cls(part, joined(keys), joined(values), exact, z)

    @property
    def n_coded(self) -> int:
        return len(self.z[0])

    def coded(self, own: FittedHeader | None, plain: PlainHeaders, unit: int) -> CodedPart:
        header, made = (plain.of(self.part), 0) if own is None else own
        pages = encode(self.part.sides, header, self.z, PageAddress(unit, self.part.number))
        at = self.exact.nonzero()[:, 0]
        kind = torch.float16 if self.keys.dtype == torch.float16 else torch.bfloat16
        keys, values = (side[at.to(side.device)].to(kind).cpu() for side in (self.keys, self.values))
        return CodedPart(header if made else None, made, pages, at[at < self.n_coded], keys, values)


def _exact(positions: Tensor, heads: slice, choose: _Choose, end: int) -> Tensor:
    """Return which entries of a part are stored as they are, (n,) bool on the CPU.

    They are sinks, those that `choose` takes, and all from `end` on.
    """
    exact = positions < SINKS
    exact[end:] = True
    middle = (~exact).nonzero()[:, 0]
    exact[middle[choose(heads, middle)]] = True
    return exact.cpu()
