"""Coded entries that a cache kept as named tensors of a layer, and back: checked before anything is decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from millpond.cache.coded.entries import decoded
from millpond.cache.coded.kept import CodedPart, Part, PlainHeaders, n_coded, parts_of, without_rest
from millpond.cache.serialization import Need
from millpond.cache.types import RotaryEmbedding, by_position
from millpond.codec.transform.page import TOKENS, PageAddress, page_bytes
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader, header_bytes
from millpond.codec.transform.transform_file import ModelTransform
from millpond.errors import DataError

#: Names of the codes of a layer: which parts have a header of their own, these, pages, and entries as they are.
FITTED, HEADERS, PAGES = "codes.fitted", "codes.headers", "codes.pages"
EXACT = ("exact.at", "exact.keys", "exact.values")
#: What a layer holds besides, and first words of the names of what it may hold of a text some of which was evicted.
PLAIN = {"keys", "values", "positions", "scores", "lens", "capacities", "recent", "head_rules", "shape"}
_STATE = {"queries", "moments", "gate"}
#: Texts up to so long have their positions in 16 bits.
SHORT = 1 << 15


def is_plain(stored: Mapping[str, Tensor]) -> bool:
    """Return whether a layer holds plain numbers and what this form keeps."""
    return {name.partition(".")[0] for name in stored} <= PLAIN | _STATE


def kept_tensors(stored: Mapping[str, Tensor], parts: Sequence[CodedPart], n_tokens: int) -> dict[str, Tensor]:
    """Return a layer whose keys and values are codes; `KeptDecoder.layer` reads it.

    Positions are those of one head where all hold the same in the same slots; scores that are all 0 are left out.

    Args:
        stored: The layer as `millpond.cache.serialization.to_tensors` names it.
        parts: Codes of its parts.
        n_tokens: Tokens of the text.
    """
    positions = without_rest(stored["positions"], stored["lens"])
    width = positions.shape[1]
    if bool((positions == positions[:1]).all()):
        positions = positions[:1]
    own = [header for part in parts if (header := part.header) is not None]
    tensors = {name: tensor for name, tensor in stored.items() if name not in ("keys", "values")}
    if not bool(tensors["scores"].any()):
        del tensors["scores"]
    return tensors | {
        "positions": positions.to(torch.int16 if n_tokens <= SHORT else torch.int32).contiguous(),
        FITTED: torch.tensor([part.header is not None for part in parts], dtype=torch.uint8),
        HEADERS: _joined([side.to_bytes() for header in own for side in header]),
        PAGES: _joined([part.pages.flatten() for part in parts]),
        EXACT[0]: torch.cat([part.at + nth * width for nth, part in enumerate(parts)]).int(),
        EXACT[1]: torch.cat([part.keys for part in parts]),
        EXACT[2]: torch.cat([part.values for part in parts]),
    }


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


class LayerCodes(NamedTuple):
    """State that later codes of a layer go on from.

    Attributes:
        headers: Headers of its parts that have one of their own, by the number of the part, on the CPU.
        exact: (m,) int64 positions of entries among those in pages that are exact in some head, ascending.
    """

    headers: dict[int, LayerHeader]
    exact: Tensor


class KeptDecoder:
    """Decoder of the layers of one text.

    Args:
        transform: The model's transform.
        bits: Mean bits a number that the text was coded with.
        rotations: Rotation of each layer's keys; None for one without.
        n_tokens: Tokens of the text.
        unit: Number of the text, in every page.
        dtype: Type of live entries.
        device: Device of the model, which computes.

    Raises:
        OptionError: bits out of range.
    """

    def __init__(
        self,
        transform: ModelTransform,
        bits: float,
        rotations: Sequence[RotaryEmbedding | None],
        n_tokens: int,
        unit: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._transform, self._rotations, self._plain = transform, rotations, PlainHeaders(transform, bits)
        self._n_tokens, self._unit, self._dtype, self._device = n_tokens, unit, dtype, device

    def layer(self, nth: int, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer as `millpond.cache.serialization.from_tensors` reads it.

        Args:
            nth: Number of the layer among those with entries.
            stored: Tensors of the layer, without the prefix of their names.

        Raises:
            DataError: a tensor is missing, damaged, or does not fit the others; nothing was decoded.
            OptionError: the layer is in parts of single heads, and the transform file has none.
        """
        return self.layer_with_codes(nth, stored)[0]

    def layer_with_codes(self, nth: int, stored: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], LayerCodes]:
        """Return a layer as `layer`, and what later codes of it go on from.

        Args:
            nth: See `layer`.
            stored: See there.

        Raises:
            DataError, OptionError: see there.
        """
        try:
            return self._layer(nth, stored)
        except KeyError as error:
            raise DataError(f"layer {nth}: the file lacks {error.args[0]!r}; save the text again") from None

    def _layer(self, nth: int, stored: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], LayerCodes]:
        def need(right: bool, rule: str) -> None:
            if not right:
                raise DataError(f"layer {nth}: the file does not fit together ({rule}); save the text again")

        heads, key_dim, value_dim = self._transform.model.shapes[nth]
        dims = (key_dim, value_dim)
        positions, order, lens = self._places(stored, heads, need)
        width, fitted = positions.shape[1], stored[FITTED]
        ordered = positions.gather(1, order)
        rest = {name: tensor for name, tensor in stored.items() if name not in (FITTED, HEADERS, PAGES, *EXACT)}
        scores = rest.get("scores", torch.zeros(heads, width))
        need(scores.shape == (heads, width) and scores.dtype == torch.float32, "each entry has a score")
        need(is_plain(rest), "it holds nothing that codes do not go with")
        together = bool((ordered == ordered[:1]).all())
        parts = parts_of(self._transform, nth, self._rotations[nth], together)
        need(fitted.dtype == torch.uint8 and fitted.shape == (len(parts),), "it has parts for what its heads hold")
        counts = lens[:1] if together else lens
        headers = self._headers(parts, fitted, stored[HEADERS], need)
        pages = _pages(headers, counts, stored[PAGES], need)
        exact = _exact(stored, counts, width, need)
        for name, dim in zip(EXACT[1:], dims, strict=True):
            rows, tensor = sum(len(at) for at in exact), stored[name]
            need(
                tensor.shape == (rows, dim * heads // len(parts)) and tensor.is_floating_point(),
                "what is stored as it is has keys and values",
            )
        entries = [torch.zeros((heads, width, dim), dtype=self._dtype, device=self._device) for dim in dims]
        begin = 0
        for part, header, codes, at, n in zip(parts, headers, pages, exact, counts, strict=True):
            own = range(heads)[part.heads]
            shape = (len(own), key_dim, value_dim)
            numbers = self._decoded(part, header, codes, ordered[own[0], : n_coded(n)], shape)
            end = begin + len(at)
            for side, tokens, name in zip(entries, numbers, EXACT[1:], strict=True):
                kept = stored[name][begin:end].to(self._device).view(len(at), len(own), side.shape[2]).transpose(0, 1)
                held = torch.zeros((len(own), n, side.shape[2]), dtype=self._dtype, device=self._device)
                held[:, : tokens.shape[1]] = tokens.to(held)
                held[:, at.to(self._device)] = kept.to(held)
                slots = order[part.heads, :n, None].to(self._device).expand_as(held)
                side[part.heads].scatter_(1, slots, held)
            begin = end
        layer = rest | {"scores": scores, "keys": entries[0], "values": entries[1], "positions": positions.int()}
        chosen = [
            ordered[part.heads.start or 0, at[at < n_coded(n)]]
            for part, at, n in zip(parts, exact, counts, strict=True)
        ]
        own_headers = {
            part.number: _on(header, torch.device("cpu"))
            for part, header, own in zip(parts, headers, fitted.tolist(), strict=True)
            if own
        }
        return layer, LayerCodes(own_headers, torch.unique(torch.cat(chosen)))

    def _places(self, stored: Mapping[str, Tensor], heads: int, need: Need) -> tuple[Tensor, Tensor, list[int]]:
        """Return positions of slots, slots by position, (H, W) each, and lengths of the heads."""
        positions, lens = stored["positions"], stored["lens"]
        need(lens.shape == (heads,) and lens.dtype == torch.int32, "each head has a number of entries")
        need(positions.ndim == 2 and len(positions) in (1, heads), "each head has positions")
        need(positions.dtype in (torch.int16, torch.int32), "positions are whole numbers")
        width = positions.shape[1]
        need(bool((lens >= 0).all()) and int(lens.max()) == width, "the longest head holds as many entries as slots")
        need(
            bool(((positions >= -1) & (positions < self._n_tokens)).all()), f"positions are -1 to {self._n_tokens - 1}"
        )
        positions = positions.long().expand(heads, -1).contiguous()
        inside = torch.arange(width) < lens[:, None]
        need(bool(((positions >= 0) == inside).all()), "a head has as many positions as entries")
        order = by_position(positions)
        ordered = positions.gather(1, order)
        need(bool(((ordered[:, 1:] > ordered[:, :-1]) | ~inside[:, 1:]).all()), "a head holds a token once")
        return positions, order, lens.tolist()

    def _headers(self, parts: Sequence[Part], fitted: Tensor, data: Tensor, need: Need) -> list[LayerHeader]:
        sizes = [[header_bytes(side.n_rows) for side in part.sides] for part in parts]
        whole = sum(sum(size) for size, own in zip(sizes, fitted.tolist(), strict=True) if own)
        need(bool((fitted <= 1).all()), "a part has a header of its own or not")
        need(data.dtype == torch.uint8 and data.shape == (whole,), f"headers have {whole} bytes")
        headers, begin = [], 0
        for part, size, own in zip(parts, sizes, fitted.tolist(), strict=True):
            if not own:
                headers.append(_on(self._plain.of(part), self._device))
                continue
            sides = []
            for side, n in zip(part.sides, size, strict=True):
                sides.append(SideHeader.from_bytes(data[begin : begin + n], side.n_rows, self._device))
                begin += n
            headers.append(LayerHeader(*sides))
        return headers

    def _decoded(
        self, part: Part, header: LayerHeader, pages: Tensor, positions: Tensor, shape: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor]:
        key, value = (side.to(self._device) for side in part.sides)
        address = PageAddress(self._unit, part.number)
        return decoded((key, value), header, pages, address, shape, positions, part.rotary)


def _pages(headers: Sequence[LayerHeader], counts: Sequence[int], data: Tensor, need: Need) -> list[Tensor]:
    """Return the pages (P, bytes) of each part."""
    sizes = [(n_coded(n) // TOKENS, page_bytes(header.bits)) for header, n in zip(headers, counts, strict=True)]
    whole = sum(n * size for n, size in sizes)
    need(data.dtype == torch.uint8 and data.shape == (whole,), f"pages have {whole} bytes")
    parts = torch.split(data, [n * size for n, size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


def _exact(stored: Mapping[str, Tensor], counts: Sequence[int], width: int, need: Need) -> list[Tensor]:
    """Return which entries of each part are stored as they are, ascending int64."""
    at = stored[EXACT[0]]
    need(at.dtype == torch.int32 and at.ndim == 1 and bool((at[1:] > at[:-1]).all()), "exact entries ascend")
    need(not len(at) or int(at[0]) >= 0, "exact entries are some of the text")
    found = []
    for nth, n in enumerate(counts):
        own = at[(at >= nth * width) & (at < nth * width + n_coded(n))].long() - nth * width
        found.append(torch.cat([own, torch.arange(n_coded(n), n)]))
    need(len(at) == sum(len(one) for one in found) - sum(n - n_coded(n) for n in counts), "exact entries are in pages")
    return found


def _on(header: LayerHeader, device: torch.device) -> LayerHeader:
    """Return a header on a device."""
    key, value = (SideHeader(*(part.to(device) for part in (side.mean, side.scale, side.bits))) for side in header)
    return LayerHeader(key, value)
