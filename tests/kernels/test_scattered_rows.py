"""Attention of scattered queries against that of a whole prompt."""

from __future__ import annotations

import pytest
import torch

from millpond.kernels import scattered_rows
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.kernels.reference import prefill
from millpond.kernels.scattered_rows import attend_scattered, attention_to_parts

SHAPES = [
    AttentionShape(0.4),
    AttentionShape(0.4, softcap=2.0),
    AttentionShape(0.4, window=6),
    AttentionShape(0.4, sink_logits=torch.tensor([0.5, -1.0, 2.0, 0.0])),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "softcap", "window", "sinks"])
@pytest.mark.parametrize("block", [1 << 21, 1])
def test_some_rows_are_those_of_all(shape: AttentionShape, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scattered_rows, "BLOCK_LOGITS", block)
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 40, 8), torch.randn(2, 40, 8), torch.randn(2, 40, 6)
    places = torch.arange(40, dtype=torch.int32)
    whole = prefill(PrefillArgs(q, k, v, places, shape)).out
    rows = torch.tensor([0, 3, 4, 11, 20, 21, 38])
    mixed = torch.randperm(40)
    found = attend_scattered(q[:, rows], k[:, mixed], v[:, mixed], places[rows], places[mixed][None], shape)
    assert torch.allclose(found, whole[:, rows], atol=1e-5)
    assert attend_scattered(q[:, :0], k, v, places[:0], places[None], shape).shape == (4, 0, 6)


def test_attention_to_parts_sums_to_what_is_counted() -> None:
    torch.manual_seed(1)
    q, k = torch.randn(4, 12, 8), torch.randn(2, 12, 8)
    places = torch.arange(12, dtype=torch.int32)
    parts = torch.tensor([2, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1])  # the first key counts for none
    found = attention_to_parts(q, k, places, places[None], AttentionShape(0.3), parts, 2)
    dense = torch.softmax(
        (q.view(2, 2, 12, 8) @ k[:, None].mT * 0.3).masked_fill(places[None] > places[:, None], -torch.inf), -1
    ).mean((0, 1))
    assert torch.allclose(found, torch.stack([dense[:, 1:4].sum(1), dense[:, 4:].sum(1)], 1), atol=1e-6)
