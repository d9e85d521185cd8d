"""Sequences in codes: they grow without being coded again, and damaged ones are refused before anything is decoded."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.cache.coded import coder as coder_module
from millpond.cache.coded.coder import LEAST_FITTED, TextCoder
from millpond.cache.coded.tensors import text_of, text_tensors
from millpond.cache.coded.text import CodedText, LayerEntries
from millpond.codec.transform.exact_tokens import NEWEST, SINKS
from millpond.errors import DataError
from millpond.hf.calibration.load import rotations_before_rope
from millpond.hf.document import read_document
from millpond.hf.model_support import supported
from tests.helpers.hf.transform import ids, tiny, transform_of_tiny

N = 900
CPU = torch.device("cpu")
HEAVY = [torch.tensor([40, 130, 500, 840]), torch.tensor([41, 299])]


@cache
def coder_of(kind: str = "gqa", bits: float = 1.5) -> TextCoder:
    return TextCoder(transform_of_tiny(kind), bits, rotations_before_rope(supported(tiny(kind))))


@cache
def whole(kind: str = "gqa") -> list[LayerEntries]:
    """What a model holds of a text."""
    with torch.no_grad(), mp.compress(tiny(kind), "full") as kept:
        read_document(tiny(kind), kept, text()[None])
        found = [layer_cache.read(0) for layer_cache in kept.layer_caches]
    return [LayerEntries(int(one.positions[0, 0]), one.keys.clone(), one.values.clone()) for one in found]


@cache
def text() -> Tensor:
    return ids(N, 7)


def until(end: int, window: int | None = None, kind: str = "gqa") -> list[LayerEntries]:
    """What the layers hold of the first `end` tokens; the second has a window."""
    found = []
    for nth, layer in enumerate(whole(kind)):
        first = 0 if window is None or not nth else max(0, end - window)
        found.append(LayerEntries(first, layer.keys[:, first:end], layer.values[:, first:end]))
    return found


def coded(end: int, before: CodedText | None = None, layers: list[LayerEntries] | None = None, **how: Any) -> CodedText:
    return coder_of().code(layers or until(end, **how), HEAVY, text().numpy(), before)


def decoded(found: CodedText) -> list[LayerEntries]:
    return list(coder_of().decode(found, torch.float32, CPU))


def pages(found: CodedText, layer: int = 0) -> Tensor:
    """All pages of a layer that have one size, one behind the other, as bytes."""
    return torch.cat([part.flatten() for part in found.layers[layer].pages])


def test_newest_sinks_and_heavy_tokens_are_as_they_were() -> None:
    for nth, (before, after) in enumerate(zip(until(N), decoded(coded(N)), strict=True)):
        covered = (N - NEWEST) // 32 * 32
        heavy = [at for at in HEAVY[nth].tolist() if at < covered]
        exact = [*range(SINKS), *heavy, *range(covered, N)]
        inside = [at for at in range(covered) if at not in exact]
        for one, other in ((before.keys, after.keys), (before.values, after.values)):
            assert torch.equal(one[:, exact].bfloat16().float(), other[:, exact])
            error = (one - other)[:, inside].square().mean() / one[:, inside].var()
            assert 0 < float(error) < 0.5
            assert not bool((one[:, inside] == other[:, inside]).all(-1).any())


def test_codes_take_few_bytes() -> None:
    found = coded(N)
    entries = sum(layer.keys.numel() + layer.values.numel() for layer in until(N))
    assert found.nbytes < 0.25 * 2 * entries


def test_a_text_grows_by_whole_pages_and_keeps_its_bytes() -> None:
    """And what was decoded is decoded so again, however often it is stored."""
    found = coded(300)
    for end in (301, 333, 390, 640, N):
        layers = [
            LayerEntries(
                0, *(torch.cat([old, new[:, found.end : end]], 1) for old, new in zip(one[1:], two[1:], strict=True))
            )
            for one, two in zip(decoded(found), until(N), strict=True)
        ]
        grown = coded(end, found, layers)
        assert grown.n_pages == (end - NEWEST) // 32
        for nth in range(2):
            size = len(pages(found, nth))
            assert torch.equal(pages(grown, nth)[:size], pages(found, nth))
            at = grown.layers[nth].at
            assert torch.equal(
                at[at < found.n_pages * 32], found.layers[nth].at[found.layers[nth].at < found.n_pages * 32]
            )
            for one, other in zip(decoded(found)[nth][1:], decoded(grown)[nth][1:], strict=True):
                assert torch.equal(one[:, : found.n_pages * 32], other[:, : found.n_pages * 32])
        found = grown


def test_a_header_serves_for_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coder_module, "HEADER_TOKENS", 256)
    found = coded(320)
    assert [(one.first, one.end, one.made, one.fitted) for one in found.segments] == [(0, 8, 8, True)]
    found = coded(340, found)
    assert [(one.first, one.end, one.made) for one in found.segments] == [(0, 8, 8)]
    found = coded(N, found)
    assert [(one.first, one.end, one.made, one.fitted) for one in found.segments] == [
        (0, 16, 8, True),
        (16, 26, 26, True),
    ]
    first, second = (segment.headers[0].key for segment in found.segments)
    assert not torch.equal(first.mean, second.mean)


def test_few_tokens_are_written_under_the_header_of_the_calibration() -> None:
    found = coded(NEWEST + LEAST_FITTED - 1)
    assert [(one.end, one.fitted) for one in found.segments] == [(LEAST_FITTED // 32 - 1, False)]
    assert not found.segments[0].headers[0].key.mean.any()
    found = coded(400, found)
    assert [(one.end, one.fitted) for one in found.segments] == [(3, False), (10, True)]


def test_a_short_text_has_no_pages() -> None:
    found = coded(95)
    assert found.segments == ()
    assert torch.equal(decoded(found)[0].keys, until(95)[0].keys.bfloat16().float())
    assert found.layers[0].later.tolist() == [40]


def test_a_window_moves_over_pages() -> None:
    """Older pages go; one that a window cuts stays; tokens of none are as they were."""
    found = coded(500, window=200)
    assert (found.layers[1].first, len(found.layers[1].pages[0])) == (300, (500 - 64) // 32 - 10)
    assert found.layers[1].at[:20].tolist() == list(range(300, 320))
    grown = coded(550, found, window=200)
    assert len(grown.layers[1].pages[0]) == (550 - 64) // 32 - 10  # from 350 on, of page 10
    assert torch.equal(pages(grown, 1)[: len(pages(found, 1))], pages(found, 1))
    grown = coded(800, grown, window=200)
    assert len(grown.layers[1].pages[0]) == (800 - 64) // 32 - (600 // 32 + 1)  # page 18 was never coded
    for one in (found, grown):
        again = text_of(text_tensors(one), coder_of().transform, text().numpy()[: one.end])
        for before, after in zip(until(one.end, window=200), decoded(again), strict=True):
            assert (before.first, before.end) == (after.first, after.end)
            error = (before.values - after.values).square().mean() / before.values.var()
            assert float(error) < 0.5


def test_the_first_pages_of_a_text() -> None:
    """A header, and with it its pages, is of one beginning: without all of that the pages are none of another text."""
    found = coded(700, coded(330))
    first = found.first_pages(12)
    assert (first.end, first.n_pages) == (384, 12)
    assert torch.equal(pages(first), found.layers[0].pages[0][:12].flatten())
    assert text_of(text_tensors(first), coder_of().transform, text().numpy()[:384]).n_pages == 12
    assert found.first_pages(7).segments == ()
    grown = coded(500, first)
    assert torch.equal(pages(grown)[: len(pages(first))], pages(first))


# ---------------------------------------------------------------------- as tensors


def test_tensors_are_the_text_again() -> None:
    found = coded(N, coded(300))
    again = text_of(text_tensors(found), coder_of().transform, text().numpy())
    assert text_tensors(again).keys() == text_tensors(found).keys()
    assert all(torch.equal(tensor, text_tensors(again)[name]) for name, tensor in text_tensors(found).items())
    for one, other in zip(decoded(found), decoded(again), strict=True):
        assert torch.equal(one.keys, other.keys)


def flip(stored: dict[str, Tensor]) -> None:
    stored["1.0.pages"][3, 20] ^= 1


def fewer_pages(stored: dict[str, Tensor]) -> None:
    stored["1.0.pages"] = stored["1.0.pages"][1:].clone()


def more_pages(stored: dict[str, Tensor]) -> None:
    stored["0.0.pages"] = stored["0.0.pages"].repeat(3, 1)


def other_end(stored: dict[str, Tensor]) -> None:
    stored["segments"][0, 1] += 1


def far_segment(stored: dict[str, Tensor]) -> None:
    stored["segments"][0, 1] = 1 << 50


def unmade(stored: dict[str, Tensor]) -> None:
    stored["segments"][0, 2] -= 1


def negative(stored: dict[str, Tensor]) -> None:
    stored["0.first"] = torch.tensor(-40)


def behind(stored: dict[str, Tensor]) -> None:
    stored["0.exact.at"][-1] = N


def narrow(stored: dict[str, Tensor]) -> None:
    stored["0.exact.values"] = stored["0.exact.values"][:, :, 1:].clone()


def no_header(stored: dict[str, Tensor]) -> None:
    del stored["0.0.value_header"]


def bits_of_header(stored: dict[str, Tensor]) -> None:
    stored["0.0.key_header"][-1] = 0x77


def later_than_none(stored: dict[str, Tensor]) -> None:
    stored["0.exact.later"] = torch.tensor([17])


@pytest.mark.parametrize(
    "change",
    [
        flip,
        fewer_pages,
        more_pages,
        other_end,
        far_segment,
        unmade,
        negative,
        behind,
        narrow,
        no_header,
        bits_of_header,
        later_than_none,
    ],
)
def test_damaged_codes_are_refused(change: Any) -> None:
    stored = {name: tensor.clone() for name, tensor in text_tensors(coded(N)).items()}
    change(stored)
    with pytest.raises(DataError):
        text_of(stored, coder_of().transform, text().numpy())


def test_codes_of_another_text_are_refused() -> None:
    other = text().numpy().copy()
    other[100] += 1
    with pytest.raises(DataError, match="another text"):
        text_of(text_tensors(coded(N)), coder_of().transform, other)
    with pytest.raises(DataError):
        text_of(text_tensors(coded(N)), coder_of().transform, text().numpy()[:500])


def test_codes_are_the_same_again() -> None:
    one, two = (text_tensors(coded(N)) for _ in range(2))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert np.isfinite(decoded(coded(N))[0].keys.numpy()).all()
