"""Which tokens are stored as they are: attention per query, by unit, in the largest KV head."""

from __future__ import annotations

import pytest
import torch

from millpond.codec.transform import exact_tokens
from millpond.codec.transform.exact_tokens import (
    LEAST_QUERIES,
    attention_per_query,
    attention_rows,
    attention_to_kept,
    most_attended,
    most_attended_of_units,
)
from millpond.kernels.args import AttentionShape

SHAPE = AttentionShape(0.25)


def heads(n: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of four heads and keys of two."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, n, 16, generator=generator), torch.randn(2, n, 16, generator=generator)


def by_hand(q: torch.Tensor, k: torch.Tensor, unit: int, shape: AttentionShape = SHAPE, least: int = 1) -> list[float]:
    """With loops over tokens, queries and heads."""
    n, rows = k.shape[1], {}
    for i in range(15, n, 16):
        first = max(0, i - shape.window + 1) if shape.window else 0
        for head in range(4):
            logits = k[head // 2, first : i + 1] @ q[head, i] * shape.scale
            if shape.softcap:
                logits = shape.softcap * torch.tanh(logits / shape.softcap)
            if shape.sink_logits is not None:
                logits = torch.cat([logits, shape.sink_logits[head, None]])
            rows[i, head] = [0.0] * first + logits.softmax(0).tolist()
    found = []
    for t in range(n):
        asked = [i for i in range(15, n, 16) if least <= i - t < (shape.window or n) and i // unit == t // unit]
        sums = [sum(rows[i, head][t] for i in asked for head in pair) / 2 for pair in ((0, 1), (2, 3))]
        found.append(max(sums) / max(len(asked), LEAST_QUERIES))
    return found


@pytest.mark.parametrize("least", [1, 9])
@pytest.mark.parametrize("unit", [32, 96, 1000])
@pytest.mark.parametrize(
    "shape",
    [SHAPE, AttentionShape(0.25, 2.0, 20), AttentionShape(0.25, sink_logits=torch.tensor([0.0, 1.0, 2.0, 3.0]))],
)
def test_attention_per_query(unit: int, shape: AttentionShape, least: int) -> None:
    q, k = heads()
    at = torch.arange(15, 96, 16)
    found = attention_per_query(q[:, at], at, k, shape, unit, least)
    torch.testing.assert_close(found, torch.tensor(by_hand(q, k, unit, shape, least)), rtol=1e-4, atol=1e-6)


def test_many_queries_are_asked_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 too, where a part of the queries is a view."""
    q, k = heads()
    at = torch.arange(15, 96, 16)
    whole = attention_per_query(q[:, at], at, k, SHAPE, 96)
    monkeypatch.setattr(exact_tokens, "TOGETHER", 2)
    torch.testing.assert_close(attention_per_query(q[:, at], at, k, SHAPE, 96), whole)


def test_a_unit_does_not_change_when_text_follows() -> None:
    """So that a block that is complete stays as it was coded."""
    q, k = heads(128)
    at = torch.arange(15, 128, 16)
    whole = attention_per_query(q[:, at], at, k, SHAPE, 32)
    begun = attention_per_query(q[:, at[:4]], at[:4], k[:, :64], SHAPE, 32)
    torch.testing.assert_close(begun, whole[:64])


def test_queries_see_themselves_and_what_is_before_them() -> None:
    q, k = heads(40)
    rows = attention_rows(q[:, 20:21], torch.tensor([20]), k, SHAPE)
    assert rows.shape == (4, 1, 40)
    assert float(rows[..., 21:].sum()) == 0
    torch.testing.assert_close(rows.sum(-1), torch.ones(4, 1))


def test_attention_to_what_each_head_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """With loops: a query attends to what its own head holds, a query before all of it to nothing."""
    (q, k), at, shape = heads(), torch.arange(15, 96, 16), AttentionShape(0.25, 2.0, 70)
    kept = [[3, 20, 41, 60, 90], [31, 33, 80]]
    positions = torch.tensor([kept[0], kept[1] + [-1, -1]])
    keys = k.gather(1, positions.clamp(min=0)[..., None].expand(-1, -1, 16))
    expected = torch.zeros(2, 5)
    for head, own in enumerate(kept):
        for place, t in enumerate(own):
            asked = [i for i in at.tolist() if 0 < i - t < 70]
            for i in asked:
                seen = [j for j in own if 0 <= i - j < 70]
                for one in (2 * head, 2 * head + 1):
                    logits = 2 * torch.tanh(k[head, seen].double() @ q[one, i].double() * 0.25 / 2)
                    expected[head, place] += logits.softmax(0)[seen.index(t)] / 2
            expected[head, place] /= max(len(asked), LEAST_QUERIES)
    for together in (256, 2):
        monkeypatch.setattr(exact_tokens, "TOGETHER", together)
        found = attention_to_kept(q[:, at], at, keys, positions, shape)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_exact_by_rank() -> None:
    attention = torch.tensor([0.3, 0.5, 0.7, 0.5, 0.6, 0.1])
    assert most_attended(attention, 0.2).nonzero()[:, 0].tolist() == [2]
    assert most_attended(attention, 0.05).sum() == 0
    assert most_attended(torch.rand(1000)).sum() == 10


@pytest.mark.parametrize("n", [40, 256, 700])
def test_exact_by_rank_in_units(n: int) -> None:
    attention = torch.rand(n)
    mask = most_attended_of_units(attention)
    for first in range(0, n, 256):
        of_unit, chosen = attention[first : first + 256], mask[first : first + 256]
        assert int(chosen.sum()) == round(3 * len(of_unit) / 256)
        if chosen.any():
            assert float(of_unit[chosen].min()) > float(of_unit[~chosen].max())
    assert not most_attended_of_units(torch.zeros(n)).any()
