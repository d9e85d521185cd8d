"""Samples of a prompt's attention that are taken pass by pass are those that are taken of the whole text at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from millpond.cache.state.attention_samples import AttentionSamples, LayerSamples
from millpond.codec.transform.exact_tokens import FAR, QUERY_STEP, SINKS, UNIT, attention_per_query
from millpond.kernels.args import AttentionShape

N, HEADS, GROUP, DIM = 700, 2, 2, 8
SHAPES = {
    "plain": AttentionShape(0.5),
    "softcap": AttentionShape(0.5, softcap=2.0),
    "window": AttentionShape(0.5, window=90),
    "sinks": AttentionShape(0.5, sink_logits=torch.tensor([0.5, 1.0, -1.0, 2.0])),
}


def numbers(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries (Hq, N, D) and keys (Hkv, N, D)."""
    torch.manual_seed(seed)
    keys = torch.randn(HEADS, N, DIM)
    keys[:, ::37] *= 3
    return torch.randn(HEADS * GROUP, N, DIM), keys


def lse_of(q: torch.Tensor, keys: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Log of the denominators of all queries, (Hq, N)."""
    logits = (q.view(HEADS, -1, DIM) @ keys.transpose(1, 2) * shape.scale).view(len(q), N, N)
    if shape.softcap:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    behind = torch.arange(N)[:, None] - torch.arange(N)
    hidden = (behind < 0) | (behind >= (shape.window or N))
    logits = logits.masked_fill(hidden, -torch.inf)
    if shape.sink_logits is not None:
        logits = torch.cat([logits, shape.sink_logits.view(-1, 1, 1).expand(-1, N, 1)], -1)
    return logits.logsumexp(-1)


def read(samples: LayerSamples, shape: AttentionShape, ends: list[int], begin: int = 0) -> None:
    q, keys = numbers()
    lse = lse_of(q, keys, shape)
    for first, end in pairwise([begin, *ends]):
        samples.observe(q[:, first:end], lse[:, first:end], keys[:, :end], shape)


def expected(shape: AttentionShape, unit: int, n: int) -> tuple[torch.Tensor, float]:
    """Which tokens are exact, and a threshold that no token of a block is near."""
    q, keys = numbers()
    at = torch.arange(QUERY_STEP - 1, n, QUERY_STEP)
    attention = attention_per_query(q[:, at], at, keys[:, :n], shape, unit, FAR if unit == UNIT else 1)
    ordered = attention.sort().values
    place = int(0.9 * n) + int((ordered[int(0.9 * n) + 1 : -4] - ordered[int(0.9 * n) : -5]).argmax())
    threshold = float(ordered[place] + ordered[place + 1]) / 2
    exact = attention > threshold
    if unit == UNIT:
        exact[:] = False
        for first in range(0, n, UNIT):
            of_unit = attention[first : first + UNIT]
            chosen = (
                of_unit[SINKS:].argsort(descending=True) + SINKS if first == 0 else of_unit.argsort(descending=True)
            )
            exact[first + chosen[: round(3 * len(of_unit) / UNIT)]] = True
    exact[:SINKS] = True
    return exact, threshold


@pytest.mark.parametrize("ends", [[N], [100, 101, 256, 290, 600, N], [*range(16, N, 16), N]])
@pytest.mark.parametrize("unit", [UNIT, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_passes_add_up_to_the_whole_text(shape: str, unit: int, ends: list[int]) -> None:
    exact, threshold = expected(SHAPES[shape], unit, N)
    samples = LayerSamples(threshold, [32])
    read(samples, SHAPES[shape], ends)
    assert samples.n == N
    assert (samples.exact(unit) == exact).all()
    assert SINKS < int(exact.sum()) < N / 5


def test_a_block_is_judged_by_its_own_queries_whatever_follows() -> None:
    _, threshold = expected(SHAPES["plain"], 32, N)
    found = []
    for n in (320, 333, N):
        samples = LayerSamples(threshold, [32])
        read(samples, SHAPES["plain"], [n])
        found.append(samples.exact(32)[:320])
    assert found[0].any()
    assert all((one == found[0]).all() for one in found)


@pytest.mark.parametrize("begin", [256, 288, 320])
def test_a_prompt_that_begins_with_read_tokens_goes_on(begin: int) -> None:
    exact, threshold = expected(SHAPES["plain"], 32, N)
    samples = LayerSamples(threshold, [32])
    samples.begin_with(exact[:begin])
    read(samples, SHAPES["plain"], [begin + 100, N], begin)
    assert (samples.exact(32) == exact).all()
    assert (samples.exact()[:begin] == exact[:begin]).all()


def test_a_gap_ends_the_samples() -> None:
    samples = AttentionSamples([LayerSamples(0.1), LayerSamples(0.1)])
    read(samples.layers[0], SHAPES["plain"], [300, 400])
    assert samples.n is None  # the other layer has seen nothing
    read(samples.layers[1], SHAPES["plain"], [400], begin=100)
    assert samples.layers[1].n is None
    assert samples.n is None
