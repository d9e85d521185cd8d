"""Coder of the sequences of a model: entries become a coded text, which grows without being coded again, and back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from millpond.cache.coded.entries import before_rope, decoded, moments, projected
from millpond.cache.coded.text import CodedLayer, CodedText, LayerEntries, Segment, positions_in_pages, unit_of
from millpond.cache.types import RotaryEmbedding
from millpond.codec.transform.coding import encode, encode_tokens
from millpond.codec.transform.exact_tokens import NEWEST, SINKS
from millpond.codec.transform.page import TOKENS, PageAddress, page_bytes
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader, adapted_headers, plain_headers
from millpond.codec.transform.transform_file import ModelTransform

#: Tokens that may follow under a header before the next ones get one of their own.
HEADER_TOKENS = 1024
#: Fewest tokens that a header is fitted to; fewer are written under the calibration's.
LEAST_FITTED = 128


class TextCoder:
    """Codes sequences of a model and decodes them; safe for several threads.

    Args:
        transform: The model's transform.
        bits: Mean bits a number.
        rotations: Rotation of the keys of each layer; None for one without.

    Attributes:
        transform: The model's transform.
        bits: Mean bits a number.
        digest: Digest of the transform.
        seconds: Seconds that it has coded ("encode") and decoded ("decode").

    Raises:
        OptionError: bits out of range.
    """

    def __init__(self, transform: ModelTransform, bits: float, rotations: Sequence[RotaryEmbedding | None]) -> None:
        self.transform, self.bits, self.digest = transform, bits, transform.digest()
        self._rotations = list(rotations)
        self.seconds = {"encode": 0.0, "decode": 0.0}
        self._plain = tuple(plain_headers(transform.layers, bits))

    # ------------------------------------------------------------------ coding

    def code(
        self, layers: Sequence[LayerEntries], exact: Sequence[Tensor], ids: np.ndarray, before: CodedText | None = None
    ) -> CodedText:
        """Return the tokens of a sequence in codes.

        All but the newest 64 are in pages, which are those of `before` and then new ones. These continue its last
        segment until that has 1,024 tokens more than its header was made of.

        Args:
            layers: What each layer holds; all end at one position.
            exact: Positions that each layer keeps as they are, int64, besides sinks and newest; those in pages of
                `before` are known from there.
            ids: Tokens of the text, (end,) at least.
            before: An earlier state of this text, whose codes the sequence was decoded from.
        """
        began = time.perf_counter()
        end = layers[0].end
        goal = max(0, end - NEWEST) // TOKENS
        if before is not None and before.n_pages > goal:
            before = before.first_pages(goal)
        segments = [] if before is None else list(before.segments)
        pages = [list(layer.pages) for layer in before.layers] if before is not None else [[] for _ in layers]
        done = 0 if before is None else before.n_pages
        known = [positions[(positions >= done * TOKENS) & (positions < end)].cpu() for positions in exact]
        if before is not None:
            known = [
                torch.cat([layer.at[layer.at < done * TOKENS], layer.later, new[~torch.isin(new, layer.later)]])
                for layer, new in zip(before.layers, known, strict=True)
            ]
        while done < goal:
            n = self._room(segments, goal - done)
            if n:
                segments[-1] = replace(segments[-1], end=done + n)
                new = [self._pages(nth, layer, segments[-1], done) for nth, layer in enumerate(layers)]
            else:
                n = goal - done
                z = [
                    projected(self.transform.layers[nth], *self._held(layer, done, goal), self._rotations[nth])
                    for nth, layer in enumerate(layers)
                ]
                headers, fitted = self._headers(z, known, goal, n)
                segments.append(Segment(done, goal, goal, unit_of(ids[: goal * TOKENS]), fitted, headers))
                new = [self._encoded(nth, segments[-1], numbers) for nth, numbers in enumerate(z)]
                for own in pages:
                    own.append(torch.zeros((0, 0), dtype=torch.uint8))
            for layer, own, made in zip(layers, pages, new, strict=True):
                if layer.first > done * TOKENS:  # all pages so far have left its window
                    own[:] = [part[:0] for part in own]
                own[-1] = torch.cat([own[-1], made]) if len(own[-1]) else made
            done += n
        written = tuple(segments)
        coded = tuple(self._layer(*one, written) for one in zip(layers, pages, known, strict=True))
        self.seconds["encode"] += time.perf_counter() - began
        return CodedText(end, written, coded)

    @staticmethod
    def _room(segments: list[Segment], wanted: int) -> int:
        """Return how many of the `wanted` pages belong in the last segment."""
        if not segments:
            return 0
        last = segments[-1]
        if not last.fitted and wanted * TOKENS >= LEAST_FITTED:
            return 0
        return max(0, min(wanted, last.made + HEADER_TOKENS // TOKENS - last.end))

    def _held(self, layer: LayerEntries, begin: int, end: int) -> tuple[Tensor, Tensor, int]:
        """Return the tokens of pages `begin` to `end`, of those that the layer holds whole.

        They are keys, values and the position of the first.
        """
        first = max(begin, -(-layer.first // TOKENS)) * TOKENS
        held = slice(first - layer.first, max(first, end * TOKENS) - layer.first)
        return layer.keys[:, held], layer.values[:, held], first

    def _headers(
        self, z: Sequence[tuple[Tensor, Tensor]], exact: Sequence[Tensor], end: int, n: int
    ) -> tuple[tuple[LayerHeader, ...], bool]:
        """Return headers for the last `n` pages before `end`.

        And whether they are fitted to the tokens of these.
        """
        if n * TOKENS < LEAST_FITTED:
            return self._plain, False
        sums = []
        for sides, at in zip(z, exact, strict=True):
            first = end * TOKENS - len(sides[0])
            chosen = torch.ones(len(sides[0]), dtype=torch.bool)
            places = torch.cat([torch.arange(SINKS), at]) - first
            chosen[places[(places >= 0) & (places < len(chosen))]] = False
            sums += [moments(side, chosen) for side in sides]
        return tuple(adapted_headers(self.transform.layers, sums, self.bits)), True

    def _pages(self, nth: int, layer: LayerEntries, segment: Segment, begin: int) -> Tensor:
        """Return the pages of a segment from `begin` on, of those that the layer holds whole."""
        keys, values, first = self._held(layer, begin, segment.end)
        if not keys.shape[1]:
            return torch.zeros((0, page_bytes(segment.headers[nth].bits)), dtype=torch.uint8)
        of_keys, of_values = before_rope(keys, values, first, self._rotations[nth])
        address = PageAddress(segment.unit, nth, first // TOKENS)
        return encode_tokens(
            self.transform.layers[nth], segment.headers[nth], (of_keys.cpu(), of_values.cpu()), address
        )

    def _encoded(self, nth: int, segment: Segment, z: tuple[Tensor, Tensor]) -> Tensor:
        """Return the pages of z, whose last one is the last of a segment."""
        header, n = segment.headers[nth], len(z[0]) // TOKENS
        if not n:
            return torch.zeros((0, page_bytes(header.bits)), dtype=torch.uint8)
        return encode(self.transform.layers[nth], header, z, PageAddress(segment.unit, nth, segment.end - n))

    @staticmethod
    def _layer(layer: LayerEntries, pages: list[Tensor], exact: Tensor, segments: tuple[Segment, ...]) -> CodedLayer:
        """Return one layer: pages of tokens that it still holds, and the other tokens as they are."""
        gone = layer.first // TOKENS
        inside = tuple(
            part[max(0, min(len(part), gone - (segment.end - len(part)))) :]
            for segment, part in zip(segments, pages, strict=True)
        )
        mask = torch.ones(layer.end - layer.first, dtype=torch.bool)
        places = positions_in_pages(segments, inside) - layer.first
        mask[places[places >= 0]] = False
        places = torch.cat([torch.arange(SINKS), exact]) - layer.first
        mask[places[(places >= 0) & (places < len(mask))]] = True
        at = mask.nonzero()[:, 0]
        here = at.to(layer.keys.device)
        kind = torch.float16 if layer.keys.dtype == torch.float16 else torch.bfloat16
        keys, values = (side[:, here].to(kind).cpu() for side in (layer.keys, layer.values))
        behind = segments[-1].end * TOKENS if segments else 0
        return CodedLayer(layer.first, inside, at + layer.first, keys, values, exact[exact >= behind])

    # ------------------------------------------------------------------ decoding

    def decode(self, text: CodedText, dtype: torch.dtype, device: torch.device) -> Iterator[LayerEntries]:
        """Yield what each layer holds, decoded, one after another.

        Args:
            text: The text.
            dtype: Type of its entries.
            device: Where they are decoded.

        Raises:
            DataError: a page is damaged, of another size, or of another text.
        """
        for nth, layer in enumerate(text.layers):
            began = time.perf_counter()
            shape = heads, *dims = self.transform.model.shapes[nth]
            key, value = (side.to(device) for side in self.transform.layers[nth])
            n = text.end - layer.first
            keys, values = (torch.zeros((heads, n, dim), dtype=dtype, device=device) for dim in dims)
            for segment, part in zip(text.segments, layer.pages, strict=True):
                if not len(part):
                    continue
                page = segment.end - len(part)
                address, first = PageAddress(segment.unit, nth, page), page * TOKENS
                header = LayerHeader(*(_on(side, device) for side in segment.headers[nth]))
                tokens = decoded((key, value), header, part, address, shape, first, self._rotations[nth])
                skipped = max(0, layer.first - first)
                begin = first + skipped - layer.first
                for held, new in zip((keys, values), tokens, strict=True):
                    held[:, begin : begin + new.shape[1] - skipped] = new[:, skipped:].to(dtype)
            at = (layer.at - layer.first).to(device)
            keys[:, at], values[:, at] = layer.keys.to(keys), layer.values.to(values)
            self.seconds["decode"] += time.perf_counter() - began
            yield LayerEntries(layer.first, keys, values)


def _on(header: SideHeader, device: torch.device) -> SideHeader:
    return SideHeader(*(part.to(device) for part in (header.mean, header.scale, header.bits)))
