"""StreamingLLM: sinks and recent entries at positions inside the cache, by exact rotation."""

import pytest
import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.pool import PagePool
from millpond.cache.state import rerotation
from millpond.cache.state.positions import PositionTracker
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from tests.helpers.papers.fixture import run

DIM, HEADS = 8, 2


class Rope:
    """Half-split rotary embedding, written on its own."""

    def rotate(self, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        inv = 1.0 / 100.0 ** (torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        angle = positions.double()[:, None, :, None] * inv * (-1 if inverse else 1)
        a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def reference(q: Tensor, k: Tensor, v: Tensor, prompt: int, sinks: int, budget: int, grow: bool = False) -> Tensor:
    """The paper's rule as it is written: unrotated keys, at each step rotated to their place in the cache.

    grow: the prompt alone is cut down to the budget.
    """
    rope, n = Rope(), q.shape[2]
    places = torch.arange(n)[None]
    qr, kr = rope.rotate(q, places), rope.rotate(k, places)
    logits = (qr @ kr.transpose(-1, -2))[:, :, :prompt, :prompt]
    causal = torch.ones(prompt, prompt, dtype=torch.bool).tril()
    outs = [torch.softmax(logits.masked_fill(~causal, float("-inf")), -1) @ v[:, :, :prompt]]
    held = list(range(prompt))
    for t in range(prompt, n):
        if len(held) > budget and (t == prompt or not grow):
            held = held[:sinks] + held[len(held) - (budget - sinks) :]
        held = [*held, t]
        inside = torch.arange(len(held))[None]
        keys = rope.rotate(k[:, :, held], inside)
        query = rope.rotate(q[:, :, t : t + 1], inside[:, -1:])
        outs.append(torch.softmax(query @ keys.transpose(-1, -2), -1) @ v[:, :, held])
    return torch.cat(outs, 2)


def stream(q: Tensor, k: Tensor, v: Tensor, prompt: int, budget: int, **options: object) -> Tensor:
    policy = METHODS.get("streaming")(**options)
    pool = PagePool(DIM, DIM, torch.float64, slots=4)
    rotary = Rope() if policy.positions == "cache_relative" else None
    cache = LayerCache(0, policy, lambda *of: budget, lambda *a: pool, PositionTracker(), rotary=rotary)
    places = torch.arange(q.shape[2])[None]
    qr, kr = Rope().rotate(q, places), Rope().rotate(k, places)
    shape = AttentionShape(scale=1.0)
    outs = [cache.attend(qr[:, :, :prompt], kr[:, :, :prompt], v[:, :, :prompt], None, shape)]
    for t in range(prompt, q.shape[2]):
        part = slice(t, t + 1)
        outs.append(cache.attend(qr[:, :, part], kr[:, :, part], v[:, :, part], None, shape))
    return torch.cat(outs, 2)


def text(n: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, n, DIM, dtype=torch.float64)
    return q, k, v


@pytest.mark.parametrize(("prompt", "sinks", "budget"), [(5, 2, 9), (20, 4, 8), (3, 4, 8), (12, 0, 5), (2, 1, 3)])
def test_equals_re_rotation_of_unrotated_keys(prompt: int, sinks: int, budget: int) -> None:
    q, k, v = text(60)
    ours = stream(q, k, v, prompt, budget, sinks=sinks)
    assert torch.allclose(ours, reference(q, k, v, prompt, sinks, budget), atol=1e-10)


@pytest.mark.parametrize(("prompt", "sinks", "budget"), [(5, 2, 9), (20, 4, 8), (12, 0, 5)])
@pytest.mark.parametrize("decode", ["grow", "once"])
def test_re_rotation_while_the_cache_grows(prompt: int, sinks: int, budget: int, decode: str) -> None:
    q, k, v = text(60)
    ours = stream(q, k, v, prompt, budget, sinks=sinks, decode=decode)
    assert torch.allclose(ours, reference(q, k, v, prompt, sinks, budget, grow=True), atol=1e-10)


def test_moving_the_frame_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = text(120)
    monkeypatch.setattr(rerotation, "EPOCH", 16)
    ours = stream(q, k, v, 6, 10, sinks=2)
    assert torch.allclose(ours, reference(q, k, v, 6, 2, 10), atol=1e-10)


def test_absolute_positions_are_another_rule() -> None:
    q, k, v = text(40)
    gapped = stream(q, k, v, 6, 8, sinks=2, positions="absolute")
    assert not torch.allclose(gapped, reference(q, k, v, 6, 2, 8), atol=1e-3)


def test_keeps_sinks_and_recent() -> None:
    assert run(METHODS.get("streaming")(sinks=1, positions="absolute"), budget=3) == [0, 4, 5]
