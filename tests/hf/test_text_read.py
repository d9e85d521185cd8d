"""What a cache remembers of the text that it read: its ids, and little beside them."""

from __future__ import annotations

import torch

from millpond.hf.tokens_read import TextRead


def test_a_long_text_in_steps_of_one_token_takes_its_ids_and_little_more() -> None:
    text = TextRead()
    ids = torch.arange(10_000)[None]
    most = 0
    for column in range(ids.shape[1]):
        text.add(ids[:, column : column + 1], column)
        most = max(most, len(text._parts))
    assert most <= 256
    assert torch.equal(text.ids, ids)
    assert text.differs(ids, torch.ones(1, 10_000, dtype=torch.bool)) is None
    other = ids.clone()
    other[0, 7_000] = 0
    assert text.differs(other, torch.ones(1, 10_000, dtype=torch.bool)) == (0, 7_000)
