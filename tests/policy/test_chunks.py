"""Chunks of text as rows: where the entries of ragged heads lie, and the way there and back."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from millpond.policy.scores.chunk_layout import ChunkLayout
from tests.helpers.examples import examples


@settings(max_examples=examples(100))
@given(
    heads=st.integers(1, 3),
    n=st.integers(1, 40),
    first=st.integers(0, 3),
    size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_every_entry_has_its_place(heads: int, n: int, first: int, size: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    rows = [sorted(torch.randperm(2 * n, generator=gen)[: max(1, n - h)].tolist()) for h in range(heads)]
    positions = torch.tensor([row + [-1] * (n - len(row)) for row in rows], dtype=torch.int32)
    n_chunks = 2 * n // size
    if not n_chunks:
        return
    chunks = ChunkLayout.of(positions, first, size, n_chunks)
    value = torch.rand(heads, n, generator=gen)
    for h, row in enumerate(rows):
        for c in range(n_chunks):
            inside = [j for j, p in enumerate(row) if first + c * size <= p < first + (c + 1) * size]
            assert chunks.columns[h, c][chunks.present[h, c]].tolist() == inside
            ranked = sorted(inside, key=lambda j, h=h: -value[h, j])  # type: ignore[misc]
            ranks = chunks.ranks(chunks.take(value))[h, c][chunks.present[h, c]].tolist()
            assert ranks == [ranked.index(j) for j in inside]
    assert torch.equal(chunks.put(chunks.take(value), value), value)
    keys = torch.rand(heads, n, 3, generator=gen)
    assert torch.equal(chunks.take(keys)[..., 1], chunks.take(keys[..., 1]))
    assert not chunks.only(torch.zeros(heads, n, dtype=torch.bool)).present.any()
