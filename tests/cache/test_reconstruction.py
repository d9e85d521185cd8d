"""The largest attention that entries receive from a repeated text, against a plain softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millpond.cache.state.reconstruction import BLOCK, ReconstructionProbe
from millpond.kernels.args import AttentionShape

TEXT, GROUP, KV_HEADS, DIM = 37, 3, 2, 16


def plain(q: Tensor, keys: Tensor, first: int, shape: AttentionShape, masses: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest attention (KV heads, text), and the log-sum-exp (heads, queries), of all keys at their index."""
    n, columns = q.shape[1], torch.arange(keys.shape[1])
    distance = first + torch.arange(n)[:, None] - columns
    hidden = distance < 0
    if shape.window:
        hidden |= distance >= shape.window
    logits = q @ keys.repeat_interleave(GROUP, 0).transpose(1, 2) * shape.scale
    if shape.softcap:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    if masses is not None:
        logits = logits + masses.repeat_interleave(GROUP, 0)[:, None]
    logits = logits.masked_fill(hidden, -torch.inf)
    best = logits.softmax(-1).view(KV_HEADS, GROUP, n, -1).amax((1, 2))
    return best[:, :TEXT], logits.logsumexp(-1)


@pytest.mark.parametrize("with_masses", [False, True])
@pytest.mark.parametrize(
    ("shape", "first"),
    [
        (AttentionShape(0.25), TEXT),
        (AttentionShape(0.25), TEXT - 9),
        (AttentionShape(0.25, window=50), TEXT),
        (AttentionShape(0.25, softcap=3.0), TEXT),
    ],
)
def test_the_largest_attention_is_that_of_a_softmax(shape: AttentionShape, first: int, with_masses: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    n = BLOCK + 13
    q = torch.randn(KV_HEADS * GROUP, n, DIM, generator=generator, dtype=torch.float64) * 4
    keys = torch.randn(KV_HEADS, first + n, DIM, generator=generator, dtype=torch.float64)
    masses = torch.randn(KV_HEADS, first + n, generator=generator, dtype=torch.float64) if with_masses else None
    expected, lse = plain(q, keys, first, shape, masses)
    order = torch.randperm(first + n, generator=generator)
    probe = ReconstructionProbe(1, KV_HEADS, TEXT, torch.device("cpu"))
    positions = order.int().expand(KV_HEADS, -1)
    shuffled = None if masses is None else masses[:, order]
    q_pos = torch.arange(first, first + n, dtype=torch.int32)
    for part in (slice(0, 5), slice(5, n)):
        probe.look(0, q[:, part], lse[:, part], q_pos[part], keys[:, order], positions, shape, shuffled)
    found = probe.at(0, torch.arange(TEXT).expand(KV_HEADS, -1))
    torch.testing.assert_close(found, expected.float())
