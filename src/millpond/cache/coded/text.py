"""Text in codes: segments of pages with a header each, and the tokens that are kept as they are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from millpond.codec.transform.page import TOKENS
from millpond.codec.transform.prompt_header import LayerHeader, header_bytes


class LayerEntries(NamedTuple):
    """Entries of a layer that holds the same neighbouring tokens in all heads.

    Attributes:
        first: Position of the first.
        keys: (H, n, D) after RoPE.
        values: (H, n, V).
    """

    first: int
    keys: Tensor
    values: Tensor

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.first + self.keys.shape[1]

    def until(self, end: int) -> LayerEntries:
        """Return those before a position."""
        n = max(0, end - self.first)
        return LayerEntries(self.first, self.keys[:, :n], self.values[:, :n])


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Neighbouring pages that were written under one header.

    Attributes:
        first: Number of its first page; page p has tokens 32 p to 32 p + 31.
        end: Number after its last one.
        made: The same when its header was made.
        unit: Number of the text in its pages.
        fitted: Whether the header is of the tokens up to `made`; else it is the calibration's.
        headers: Of each layer, on the CPU.
    """

    first: int
    end: int
    made: int
    unit: int
    fitted: bool
    headers: tuple[LayerHeader, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CodedLayer:
    """Tokens of one layer.

    Attributes:
        first: Position of the first token that it holds.
        pages: For each segment (P, bytes) uint8: its last P pages, fewer than it has where older ones left a window.
        at: (m,) int64 positions of the tokens that are kept as they are, ascending.
        keys: (H, m, D) of these.
        values: (H, m, V) of these.
        later: Those of `at` behind all pages that are to stay as they are when their page is coded, int64.
    """

    first: int
    pages: tuple[Tensor, ...]
    at: Tensor
    keys: Tensor
    values: Tensor
    later: Tensor

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.pages, self.at, self.keys, self.values, self.later))


@dataclass(frozen=True, slots=True, eq=False)
class CodedText:
    """All tokens that a sequence holds, which neighbour each other up to its end.

    Attributes:
        end: Position after the last token.
        segments: In the order of the text; the first begins at page 0.
        layers: Its layers.
    """

    end: int
    segments: tuple[Segment, ...]
    layers: tuple[CodedLayer, ...]

    @property
    def n_pages(self) -> int:
        """Pages of codes, those that have left a window included."""
        return self.segments[-1].end if self.segments else 0

    @property
    def nbytes(self) -> int:
        """Bytes of pages, headers, and tokens that are kept as they are."""
        headers = sum(
            header_bytes(len(side.bits)) for segment in self.segments for header in segment.headers for side in header
        )
        return headers + sum(layer.nbytes for layer in self.layers)

    def exact(self, n: int) -> Tensor:
        """Return which of the first `n` tokens stay as they are, (layers, n) bool.

        Tokens behind all pages are among them if they will stay so when their page is coded.
        """
        mask = torch.zeros(len(self.layers), n, dtype=torch.bool)
        for own, layer in zip(mask, self.layers, strict=True):
            own[layer.at[layer.at < min(n, self.n_pages * TOKENS)]] = True
            own[layer.later[layer.later < n]] = True
        return mask

    def first_pages(self, n: int) -> CodedText:
        """Return its first `n` pages, without a segment whose header is made of more."""
        segments = tuple(replace(part, end=min(part.end, n)) for part in self.segments if part.made <= n)
        end = segments[-1].end * TOKENS if segments else 0
        layers = []
        for layer in self.layers:
            pages = tuple(
                part[: max(0, len(part) - (whole.end - cut.end))]
                for part, whole, cut in zip(layer.pages, self.segments, segments, strict=False)
            )
            kept = layer.at < end
            keys, values, later = layer.keys[:, kept], layer.values[:, kept], layer.later[:0]
            layers.append(CodedLayer(layer.first, pages, layer.at[kept], keys, values, later))
        return CodedText(end, segments, tuple(layers))


def positions_in_pages(segments: tuple[Segment, ...], pages: tuple[Tensor, ...]) -> Tensor:
    """Return the positions that the pages of a layer have, ascending, int64."""
    spans = [
        torch.arange((segment.end - len(part)) * TOKENS, segment.end * TOKENS)
        for segment, part in zip(segments, pages, strict=True)
    ]
    return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)


def unit_of(ids: Tensor | np.ndarray) -> int:
    """Return the number of a text in its pages: 4 bytes of the SHA-256 of its ids."""
    ids = ids if isinstance(ids, Tensor) else torch.from_numpy(np.ascontiguousarray(ids))
    digest = hashlib.sha256(ids.cpu().int().contiguous().numpy().tobytes()).digest()
    return int.from_bytes(digest[:4], "little")
