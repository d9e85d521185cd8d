"""Attention of scattered queries against that of a whole prompt."""

from __future__ import annotations

import pytest
import torch

from millpond.kernels import scattered_rows
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.kernels.reference import prefill
from millpond.kernels.scattered_rows import _blocks, attend_scattered, attention_to_parts

SHAPES = [
    AttentionShape(0.4),
    AttentionShape(0.4, softcap=2.0),
    AttentionShape(0.4, window=6),
    AttentionShape(0.4, sink_logits=torch.tensor([0.5, -1.0, 2.0, 0.0])),
]
NAMES = ["plain", "softcap", "window", "sinks"]
ROWS = {
    "scattered": [0, 3, 4, 11, 20, 21, 38],
    "a run between": [2, *range(5, 25), 30, 33, 39],
    "all": [*range(40)],
    "the last": [39],
    "two": [0, 39],
}


@pytest.mark.covering
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("together", [1, 4, 32])
@pytest.mark.parametrize("mixed", [False, True], ids=["in order", "mixed"])
def test_some_rows_are_those_of_all(
    shape: AttentionShape, rows: str, together: int, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scattered_rows, "BLOCK_ROWS", together)
    monkeypatch.setattr(scattered_rows, "BLOCK_LOGITS", 1)
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 40, 8), torch.randn(2, 40, 8), torch.randn(2, 40, 8)
    places = torch.arange(40, dtype=torch.int32)
    whole = prefill(PrefillArgs(q, k, v, places, shape)).out
    chosen = torch.tensor(ROWS[rows])
    order = torch.randperm(40) if mixed else torch.arange(40)
    found = attend_scattered(q[:, chosen], k[:, order], v[:, order], places[chosen], places[order][None], shape)
    assert torch.allclose(found, whole[:, chosen], atol=1e-5)


def test_no_rows() -> None:
    q, k = torch.randn(4, 0, 8), torch.randn(2, 5, 8)
    places = torch.arange(5, dtype=torch.int32)
    assert attend_scattered(q, k, k, places[:0], places[None], SHAPES[0]).shape == (4, 0, 8)


@pytest.mark.parametrize("rows", ROWS)
def test_blocks_cut_the_rows_in_order(rows: str) -> None:
    found = list(_blocks(ROWS[rows]))
    assert [n for begin, end in found for n in range(begin, end)] == [*range(len(ROWS[rows]))]
    assert all(begin < end for begin, end in found)


@pytest.mark.parametrize("n_parts", [2, 11], ids=["few", "more than a key has numbers"])
@pytest.mark.parametrize("mixed", [False, True], ids=["in order", "in any order"])
def test_attention_to_parts_sums_to_what_is_counted(n_parts: int, mixed: bool) -> None:
    torch.manual_seed(1)
    q, k = torch.randn(4, 12, 8), torch.randn(2, 12, 8)
    places, rows = torch.arange(12, dtype=torch.int32), torch.tensor([1, 4, 5, 6, 11])
    parts = torch.arange(12).sub(1).remainder(n_parts)
    parts[0] = n_parts  # the first key counts for none
    order = torch.randperm(12) if mixed else torch.arange(12)
    shape = AttentionShape(0.3)
    found = attention_to_parts(q[:, rows], k[:, order], places[rows], places[order][None], shape, parts[order], n_parts)
    dense = torch.softmax(
        (q.view(2, 2, 12, 8) @ k[:, None].mT * 0.3).masked_fill(places[None] > places[:, None], -torch.inf), -1
    ).mean((0, 1))[rows]
    expected = torch.stack([dense[:, parts == part].sum(1) for part in range(n_parts)], 1)
    assert torch.allclose(found, expected, atol=1e-6)


def test_no_rows_give_no_parts() -> None:
    q, k = torch.randn(4, 0, 8), torch.randn(2, 5, 8)
    places = torch.arange(5, dtype=torch.int32)
    assert attention_to_parts(q, k, places[:0], places[None], SHAPES[0], places.long(), 3).shape == (0, 3)
