"""What a view shows of keys and values: in the order of positions, only when asked, and not where there are latents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.cache.attention.paged import PagedAttention
from millpond.errors import NumericsError, UnsupportedModelError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.methods import METHODS
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.key_geometry import KeyNorm
from millpond.policy.view import View
from tests.helpers.hf.families import left_padded, shared_model
from tests.helpers.matrix.models import llama, prompts

LOOK_AT_KEYS = ("knorm", "keydiff", "lagkv", "compactor", "rkv")
LOOK_AT_ANY = (*LOOK_AT_KEYS, "criticalkv")


@dataclass(frozen=True)
class Spy:
    """A score by position that remembers what it was shown."""

    seen: list[tuple[View, Tensor, Tensor]] = field(default_factory=list)
    queries: Any = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        self.seen.append((view, view.keys, view.values))
        return (view.positions * 7 % 11).float()


def test_keys_and_values_of_each_position_at_every_plan() -> None:
    """At the prompt's end and after each step, in a padded batch and in slots that are out of order."""
    spy, model = Spy(), llama()
    ids, mask = prompts(2)
    later = torch.randint(2, 96, (2, 8), generator=torch.Generator().manual_seed(2))
    full: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}

    def remember(layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, shape: Any) -> None:
        for b in range(len(k)):
            real = [c for c in range(k.shape[2]) if mask[b, mask.shape[1] - k.shape[2] + c]]
            full.setdefault((layer, b), []).append((k[b][:, real], v[b][:, real]))

    with torch.no_grad(), mp.compress(model, Policy(score=spy), 12, page_slots=4) as cache:
        cache.watch(remember)
        for t in range(9):
            step = ids if t == 0 else later[:, t - 1 : t]
            seen = torch.cat([mask, torch.ones(2, t, dtype=mask.dtype)], 1)
            places = (seen.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
            model(step, cache=cache, attention_mask=seen, position_ids=places)
    assert len(spy.seen) == 2 * 2 * 9
    for view, keys, values in spy.seen:
        k, v = (torch.cat(parts, 1) for parts in zip(*full[view.layer, view.sequence], strict=True))
        assert (view.positions.diff(dim=1) > 0).all()
        for h in range(2):
            assert torch.equal(keys[h], k[h, view.positions[h].long()])
            assert torch.equal(values[h], v[h, view.positions[h].long()])
        assert keys.dtype == torch.float64


def test_empty_columns_are_zero_and_half_precision_is_widened() -> None:
    positions = torch.tensor([[0, 3], [2, -1]], dtype=torch.int32)
    stored = torch.full((2, 2, 3), 5.0, dtype=torch.bfloat16)
    stored[1, 1] = float("nan")
    keys = View(positions, None, 4, 0, read_entries=lambda part: stored).keys
    assert keys.dtype == torch.float32
    assert keys[:, :, 0].tolist() == [[5, 5], [5, 0]]


def test_no_copy_where_no_score_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    before = PagedAttention.contents
    monkeypatch.setattr(
        PagedAttention,
        "contents",
        lambda self, table, found, part: (asked.append(part), before(self, table, found, part))[1],
    )
    model, (ids, _) = llama(), prompts(1)
    for method, expected in (("h2o", []), ("knorm", ["keys"] * 2), ("lagkv", ["keys", "values"] * 2)):
        asked.clear()
        options = {"lag": 8} if method == "lagkv" else {}
        with torch.no_grad(), mp.compress(model, method, 20, **options) as cache:
            model(ids, cache=cache)
        assert asked == expected, method


def test_only_free_entries_are_free() -> None:
    positions = torch.tensor([[0, 1, 2, -1]], dtype=torch.int32)
    view = View(positions, None, 3, 0)
    assert view.free.tolist() == [[True, True, True, False]]
    seen: list[list[bool]] = []

    class Look(KeyNorm):
        def score(self, view: View, seed: int) -> Tensor:
            seen.extend(view.free.tolist())
            return view.positions.float()

    Policy(score=Look(), protect=Protect(sinks=1, recent=1)).plan(view, 2)
    assert seen == [[False, True, False, False]]


@pytest.mark.parametrize("method", LOOK_AT_ANY)
def test_latents_are_refused_with_the_reason(method: str) -> None:
    model = shared_model("deepseek_v3")
    options = {"lagkv": {"lag": 4}, "criticalkv": {"score": "tova"}}.get(method, {})
    with (
        torch.no_grad(),
        mp.compress(model, method, 14, **options) as cache,
        pytest.raises(
            UnsupportedModelError, match=r"layer 0 stores latents \(MLA\).*use a method that scores by attent"
        ),
    ):
        model(**left_padded([40]), cache=cache)


def test_chunks_over_attention_work_with_latents() -> None:
    model = shared_model("deepseek_v3")
    with torch.no_grad(), mp.compress(model, "chunkkv", 14, score="tova", chunk=4) as cache:
        model(**left_padded([40]), cache=cache)
        assert [len(row) for row in cache.positions(0)] == [14]


@pytest.mark.parametrize("method", LOOK_AT_KEYS)
def test_every_score_composes_with_head_budgets(method: str) -> None:
    assert METHODS.get("ada")(score=method).score is not None
    model, (ids, _) = llama(), prompts(1)
    with torch.no_grad(), mp.compress(model, "ada", 16, score=method) as cache:
        model(ids, cache=cache)
        assert [sum(len(head) for head in cache.positions(layer)) for layer in (0, 1)] == [32, 32]


@pytest.mark.parametrize("method", LOOK_AT_KEYS)
def test_nan_keys_are_reported(method: str) -> None:
    keys = torch.randn(1, 30, 4, generator=torch.Generator().manual_seed(0))
    keys[0, 9] = float("nan")
    positions = torch.arange(30, dtype=torch.int32)[None]
    view = View(positions, torch.rand(1, 30), 30, layer=3, read_entries=lambda part: keys)
    options = {"lag": 8} if method == "lagkv" else {}
    with pytest.raises(NumericsError, match="layer 3"):
        METHODS.get(method)(**options).plan(view, 20)
