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


def expected(shape: AttentionShape, n: int) -> torch.Tensor:
    """Which of the first n tokens are exact."""
    q, keys = numbers()
    at = torch.arange(QUERY_STEP - 1, n, QUERY_STEP)
    attention = attention_per_query(q[:, at], at, keys[:, :n], shape, UNIT, FAR)
    exact = torch.arange(n) < SINKS
    for first in range(0, n, UNIT):
        of_unit = attention[first : first + UNIT]
        skipped = SINKS if first == 0 else 0
        chosen = of_unit[skipped:].argsort(descending=True) + skipped
        exact[first + chosen[: round(3 * len(of_unit) / UNIT)]] = True
    return exact


@pytest.mark.parametrize("ends", [[N], [100, 101, 256, 290, 600, N], [*range(16, N, 16), N]])
@pytest.mark.parametrize("shape", SHAPES)
def test_passes_add_up_to_the_whole_text(shape: str, ends: list[int]) -> None:
    exact, samples = expected(SHAPES[shape], N), LayerSamples()
    read(samples, SHAPES[shape], ends)
    assert samples.n == N
    assert (samples.exact() == exact).all()
    assert SINKS < int(exact.sum()) < N / 5


@pytest.mark.parametrize("n", [320, 512, 650])
def test_what_was_read_so_far_is_judged_by_the_queries_so_far(n: int) -> None:
    """A whole unit stays as it was judged, whatever follows."""
    samples = LayerSamples()
    read(samples, SHAPES["plain"], [n])
    assert (samples.exact() == expected(SHAPES["plain"], n)).all()
    read(samples, SHAPES["plain"], [N], n)
    assert (samples.exact() == expected(SHAPES["plain"], N)).all()


@pytest.mark.parametrize("begin", [256, 288, 320])
def test_a_prompt_that_begins_with_read_tokens_goes_on(begin: int) -> None:
    """Tokens that another prompt has read stay what they were; those behind the unit that it began are as ever."""
    given, whole = torch.arange(begin) % 50 == 7, UNIT * -(-begin // UNIT)
    samples = LayerSamples()
    samples.begin_with(given)
    read(samples, SHAPES["plain"], [begin + 100, N], begin)
    exact = samples.exact()
    assert (exact[SINKS:begin] == given[SINKS:]).all()
    assert 0 <= int(exact[begin:whole].sum()) <= 3
    assert (exact[whole:] == expected(SHAPES["plain"], N)[whole:]).all()


def test_a_gap_ends_the_samples() -> None:
    samples = AttentionSamples([LayerSamples(), LayerSamples()])
    read(samples.layers[0], SHAPES["plain"], [300, 400])
    assert samples.n is None  # the other layer has seen nothing
    read(samples.layers[1], SHAPES["plain"], [400], begin=100)
    assert samples.layers[1].n is None
    assert samples.n is None
