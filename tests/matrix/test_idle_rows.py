"""A turn that brings only some sequences of a batch anything leaves the others as they were."""

import pytest
import torch

import millpond as mp
from tests.helpers.matrix.models import llama

LENGTH, DECODED, TURN, MORE = 30, 12, 4, 6


def draw(seed, length):
    return torch.randint(2, 96, (2, length), generator=torch.Generator().manual_seed(seed))


def kept(method, options, rows):
    """Positions kept of `rows` after a prompt, decoding, a turn of row 0 alone, and more decoding."""
    model, prompt, decoded, turn, more = llama(), draw(1, LENGTH), draw(2, DECODED), draw(3, TURN), draw(5, MORE)
    mask = torch.ones(len(rows), LENGTH + DECODED, dtype=torch.long)
    with torch.no_grad(), mp.compress(model, method, "30%", **options) as cache:
        model(prompt[rows], cache=cache)
        for i in range(DECODED):
            model(decoded[rows, i : i + 1], cache=cache)
        if 0 in rows:
            mask = torch.cat([mask, torch.tensor([[row == 0] * TURN for row in rows]).long()], 1)
            places = (mask.cumsum(1) - 1)[:, -TURN:]
            model(turn[rows], attention_mask=mask, position_ids=places, cache=cache)
        for i in range(MORE):
            mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.long)], 1)
            places = mask.sum(1, keepdim=True) - 1
            model(more[rows, i : i + 1], attention_mask=mask, position_ids=places, cache=cache)
        return [cache.positions(0, s) for s in range(len(rows))]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("h2o", {}),
        ("snapkv", {"window": 4}),
        ("sirllm", {"sinks": 2, "recent": 3}),
        ("kvzip", {"ask": "5;6;7", "sinks": 2}),
    ],
)
def test_a_turn_of_one_row(method, options):
    assert kept(method, options, [0, 1]) == [*kept(method, options, [0]), *kept(method, options, [1])]
