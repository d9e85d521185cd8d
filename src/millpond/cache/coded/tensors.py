"""Coded texts as named tensors, for files and for what is sent, and back: checked before anything is decoded."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from millpond.cache.coded.text import CodedLayer, CodedText, Segment, positions_in_pages, unit_of
from millpond.codec.transform.page import TOKENS, PageAddress, check_pages, page_bytes
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader
from millpond.codec.transform.transform_file import ModelTransform
from millpond.errors import DataError

#: Names of the whole text, and of each layer behind its number; those of a segment have its number too.
SEGMENTS, FIRST = "segments", "first"
_EXACT = ("exact.at", "exact.keys", "exact.values", "exact.later")
_CPU = torch.device("cpu")


def text_tensors(text: CodedText) -> dict[str, Tensor]:
    """Return all that `text_of` needs, on the CPU."""
    numbers = [[part.first, part.end, part.made, int(part.fitted)] for part in text.segments]
    tensors = {SEGMENTS: torch.tensor(numbers, dtype=torch.int64).view(-1, 4)}
    for nth, layer in enumerate(text.layers):
        own = {
            FIRST: torch.tensor(layer.first),
            **dict(zip(_EXACT, (layer.at, layer.keys, layer.values, layer.later), strict=True)),
        }
        for number, (segment, pages) in enumerate(zip(text.segments, layer.pages, strict=True)):
            key, value = segment.headers[nth]
            own |= {f"{number}.pages": pages}
            own |= {f"{number}.key_header": key.to_bytes(), f"{number}.value_header": value.to_bytes()}
        tensors |= {f"{nth}.{name}": tensor.contiguous() for name, tensor in own.items()}
    return tensors


def text_of(stored: Mapping[str, Tensor], transform: ModelTransform, ids: np.ndarray) -> CodedText:
    """Return the text of `text_tensors`.

    Args:
        stored: Its tensors; others are not looked at.
        transform: The transform that it was coded with.
        ids: Tokens of the text, all of them.

    Raises:
        DataError: a tensor is missing, damaged, does not fit the others, or is of another text; nothing was decoded.
    """
    try:
        end, shapes = len(ids), transform.model.shapes
        segments = _segments(stored, transform, ids)
        layers = [_layer(nth, stored, shapes[nth], segments, end) for nth in range(len(shapes))]
    except KeyError as error:
        raise DataError(f"codes of a text lack {error.args[0]!r}; read its prompt again") from None
    return CodedText(end, segments, tuple(layers))


def _need(right: bool, rule: str) -> None:
    if not right:
        raise DataError(f"codes of a text do not fit together ({rule}); read its prompt again")


def _segments(stored: Mapping[str, Tensor], transform: ModelTransform, ids: np.ndarray) -> tuple[Segment, ...]:
    numbers = stored[SEGMENTS]
    _need(numbers.dtype == torch.int64 and numbers.ndim == 2 and numbers.shape[1] == 4, "segments have four numbers")
    _need(len(numbers) <= len(ids) // TOKENS, "a segment has a page or more")
    begun, segments = 0, []
    for number, (first, end, made, fitted) in enumerate(numbers.tolist()):
        _need(first == begun < made <= end <= len(ids) // TOKENS, "segments follow each other inside the text")
        _need(fitted in (0, 1), "a header is of the text or of the calibration")
        headers = tuple(
            LayerHeader(
                *(
                    SideHeader.from_bytes(stored[f"{nth}.{number}.{name}_header"], side.n_rows, _CPU)
                    for name, side in zip(("key", "value"), sides, strict=True)
                )
            )
            for nth, sides in enumerate(transform.layers)
        )
        segments.append(Segment(first, end, made, unit_of(ids[: made * TOKENS]), bool(fitted), headers))
        begun = end
    return tuple(segments)


def _layer(
    nth: int, stored: Mapping[str, Tensor], shape: tuple[int, int, int], segments: tuple[Segment, ...], end: int
) -> CodedLayer:
    heads, *dims = shape
    first_number = stored[f"{nth}.{FIRST}"]
    _need(first_number.numel() == 1 and first_number.dtype == torch.int64, "a layer has a first token")
    first = int(first_number)
    at, keys, values, later = (stored[f"{nth}.{name}"] for name in _EXACT)
    _need(0 <= first < end, "a layer holds tokens of the text")
    _need(at.dtype == torch.int64 and at.ndim == 1 and bool((at[1:] > at[:-1]).all()), "exact tokens ascend")
    _need(not len(at) or (int(at[0]) >= first and int(at[-1]) < end), "exact tokens are of the layer")
    _need(later.dtype == torch.int64 and bool(torch.isin(later, at).all()), "later ones are among them")
    for tensor, dim in zip((keys, values), dims, strict=True):
        _need(tensor.shape == (heads, len(at), dim) and tensor.is_floating_point(), "exact tokens have all heads")
    pages = []
    for number, segment in enumerate(segments):
        part = stored[f"{nth}.{number}.pages"]
        _need(part.ndim == 2 and len(part) <= segment.end - segment.first, "a segment has no more pages than it says")
        check_pages(
            part, page_bytes(segment.headers[nth].bits), PageAddress(segment.unit, nth, segment.end - len(part))
        )
        pages.append(part)
    covered = torch.zeros(end - first, dtype=torch.bool)
    places = positions_in_pages(segments, tuple(pages)) - first
    covered[places[places >= 0]] = True
    covered[at - first] = True
    _need(bool(covered.all()), "what no page holds is exact")
    return CodedLayer(first, tuple(pages), at, keys, values, later)
