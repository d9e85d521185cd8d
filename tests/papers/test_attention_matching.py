"""Attention Matching: masses and values against plain least squares, and what they leave as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
from torch import Tensor
from transformers import LlamaForCausalLM

import millpond as mp
from millpond.errors import OptionError, UnsupportedModelError
from millpond.methods import METHODS
from millpond.policy.matched_merge import MatchAttention
from millpond.policy.view import View
from tests.helpers.hf.families import FAMILIES, shared_model, text
from tests.helpers.matrix.models import llama, prompts
from tests.matrix import test_invariance as matrix

ASK, E = [5, 6, 7], math.e
SETTINGS: dict[str, Any] = {"ask": "5;6;7", "sinks": 2, "queries": 8192}
CHECKS: dict[str, Callable[[str], None]] = {
    "batch": matrix.test_batch_and_padding,
    "reset": matrix.test_a_second_prompt_equals_a_fresh_cache,
    "bytes": matrix.test_bytes_are_real_and_freed,
    "everything": matrix.test_budget_of_everything_equals_full,
    "first token": matrix.test_first_token_is_exact,
    "pages": lambda method: matrix.test_page_size(method, 4),
    "chunks": lambda method: matrix.test_chunks_without_eviction_between_them(method, 7),
}


@pytest.mark.parametrize("check", CHECKS)
def test_matrix(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, "attention_matching", {**SETTINGS, "across": False, "chunk": 16})
    CHECKS[check]("attention_matching")


def view_of(rows: Tensor, values: Tensor, pinned: int = 0) -> View:
    """One head that `rows` (m, N) attend to; the first entries are pinned."""
    n = len(values)
    positions = torch.arange(n, dtype=torch.int32)[None]
    return View(
        positions,
        torch.zeros(1, n),
        n,
        0,
        pinned=(positions < pinned),
        read_entries=lambda part: torch.zeros(1, n, 2, dtype=values.dtype) if part == "keys" else values[None],
        repeated_rows=lambda head: rows[None],
    )


def attention(m: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Attention (m, n) of random queries, and values (n, 3)."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in (m, n))
    return (q @ k.T).softmax(1), torch.randn(n, 3, generator=generator, dtype=torch.float64)


def test_one_entry_stands_for_two_of_equal_keys() -> None:
    """The card's fixture: mass 2, and the mean of the values; what no query attends to holds nothing back."""
    rows = torch.tensor([[0.3, 0.3, 0.4], [0.1, 0.1, 0.8], [0.45, 0.45, 0.1]], dtype=torch.float64)
    values = torch.tensor([[1.0, 0.0], [3.0, 4.0], [7.0, 7.0]], dtype=torch.float64)
    keep = torch.tensor([[True, False, True]])
    found = MatchAttention(ridge=1e-8).merge(view_of(rows, values), keep, torch.zeros(1, 3), 0)
    assert found.log_masses[0, [0, 2]].tolist() == pytest.approx([math.log(2), 0.0], abs=1e-5)
    assert torch.allclose(found.values[0, [0, 2]], torch.tensor([[2.0, 2.0], [7.0, 7.0]]).double(), atol=1e-4)


def plain_fit(
    rows: Tensor, values: Tensor, keep: Tensor, pinned: int, own: Tensor, ridge: float
) -> tuple[np.ndarray, np.ndarray]:
    """Masses and values of what stays of one head, by the solvers of scipy and numpy on stacked equations."""
    a, v, chosen = rows.numpy(), values.numpy(), np.flatnonzero(keep.numpy())
    first, free, s = chosen[chosen < pinned], chosen[chosen >= pinned], own.numpy()

    def stacked(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weight = np.sqrt(ridge * (shares**2).sum(0).mean() + s[free] ** 2)
        return np.vstack([shares, np.diag(weight)]), weight

    design, weight = stacked(a[:, free])
    wanted = np.concatenate([a.sum(1) - a[:, first].sum(1), weight])
    masses = np.concatenate([np.ones(len(first)), lsq_linear(design, wanted, (E**-3, E**3), tol=1e-14).x])
    w = a[:, chosen] * masses
    w /= w.sum(1, keepdims=True)
    design, weight = stacked(w[:, len(first) :])
    rest = a @ v / a.sum(1, keepdims=True) - w[:, : len(first)] @ v[first]
    fitted = np.linalg.lstsq(design, np.vstack([rest, weight[:, None] * v[free]]), rcond=None)[0]
    return masses, np.vstack([v[first], fitted])


@pytest.mark.parametrize(("m", "n", "pinned"), [(40, 12, 0), (40, 12, 2), (5, 20, 1)])
def test_the_fit_is_that_of_plain_least_squares(m: int, n: int, pinned: int) -> None:
    rows, values = attention(m, n)
    keep = torch.zeros(1, n, dtype=torch.bool)
    keep[0, ::2] = True
    keep[0, :pinned] = True
    most = torch.rand(1, n, generator=torch.Generator().manual_seed(3)) * 0.3
    found = MatchAttention(ridge=0.01).merge(view_of(rows, values, pinned), keep, most, 0)

    b, fitted = plain_fit(rows, values, keep[0], pinned, most[0].double(), 0.01)
    assert found.log_masses[0, keep[0]].exp().numpy() == pytest.approx(b, rel=1e-4)
    assert found.values[0, keep[0]].numpy() == pytest.approx(fitted, abs=1e-4)
    assert torch.equal(found.values[0, :pinned], values[:pinned])
    assert not found.log_masses[0, :pinned].any()


def test_an_entry_stays_as_it_was_for_its_own_query() -> None:
    """One that a query outside the fit attends to alone is not bent to serve the others."""
    rows, values = attention(60, 16)
    keep = torch.zeros(1, 16, dtype=torch.bool)
    keep[0, :6] = True
    most = torch.zeros(1, 16)
    free = MatchAttention().merge(view_of(rows, values), keep, most, 0)
    most[0, 2] = 1.0
    held = MatchAttention().merge(view_of(rows, values), keep, most, 0)
    moved = [(found.values[0] - values).norm(dim=1) for found in (free, held)]
    assert moved[1][2] < moved[0][2] / 5
    assert (moved[1][[0, 1, 3, 4, 5]] > 0.01).all()


@pytest.mark.parametrize("option", ["masses", "values"])
def test_each_part_alone(option: str) -> None:
    rows, values = attention(40, 12)
    keep = torch.zeros(1, 12, dtype=torch.bool)
    keep[0, :5] = True
    found = MatchAttention(**{option: False}).merge(view_of(rows, values), keep, torch.zeros(1, 12), 0)
    assert bool(found.log_masses.any()) is (option == "values")
    assert torch.equal(found.values[0], values) is (option == "values")


def test_many_more_entries_than_queries_and_entries_without_attention() -> None:
    rows, values = attention(4, 30)
    rows[:, 5] = 0
    keep = torch.zeros(1, 30, dtype=torch.bool)
    keep[0, :20] = True
    found = MatchAttention(ridge=1e-8).merge(view_of(rows, values), keep, torch.zeros(1, 30), 0)
    assert found.values[0, :20].isfinite().all()
    assert found.log_masses[0, :20].isfinite().all()
    assert torch.allclose(found.values[0, 5], values[5])
    assert MatchAttention().merge(view_of(rows * 0, values), keep, torch.zeros(1, 30), 0).values.isfinite().all()


def test_a_model_holds_what_plain_least_squares_give() -> None:
    """The same entries as kvzip, fitted to the attention of transformers' own repetition of the prompt."""
    model, ids = deepcopy(llama("gqa")).double(), prompts(1)[0]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 4
    n, whole = ids.shape[1], torch.cat([ids, torch.tensor([ASK]), ids], 1)
    eager = LlamaForCausalLM(deepcopy(model.config)).double().eval()
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    with torch.no_grad(), mp.compress(model, "kvzip", 9, ask="5;6;7", sinks=2) as cache:
        model(ids, cache=cache)
        kept = [cache.positions(layer, 0) for layer in (0, 1)]
    with torch.no_grad(), mp.compress(model, "full") as cache:
        model(ids, cache=cache)
        values = [layer.read(0).values for layer in cache.layer_caches]
    with torch.no_grad(), mp.compress(model, "attention_matching", 9, **SETTINGS) as cache:
        model(ids, cache=cache)
        assert [cache.positions(layer, 0) for layer in (0, 1)] == kept
        entries = [layer.read(0) for layer in cache.layer_caches]
        cache.check_integrity()
    moved = 0.0
    for layer, p in enumerate(eager(whole, output_attentions=True).attentions):
        for head, mine in enumerate(kept[layer]):
            group = p.shape[1] // len(kept[layer])
            rows = p[0, head * group : (head + 1) * group, n:, :n].detach().flatten(0, 1)
            keep = torch.isin(torch.arange(n), torch.tensor(mine))
            own, all_values = rows.amax(0), values[layer][head, :n]
            masses, fitted = plain_fit(rows / rows.sum(1, keepdim=True), all_values, keep, 2, own, 1e-3)
            found = entries[layer]
            order = found.positions[head].argsort()[-len(mine) :]
            assert found.log_masses is not None
            assert found.log_masses[head, order].exp().numpy() == pytest.approx(masses, rel=1e-3)
            assert found.values[head, order].numpy() == pytest.approx(fitted, abs=1e-3)
            moved = max(moved, float(np.abs(fitted - all_values[keep].numpy()).max()), float(masses.max()) - 1)
    assert moved > 0.05


@pytest.mark.parametrize(("queries", "chunk"), [(7, 100), (7, 16), (1, 100), (8192, 16)])
def test_queries_are_spread_over_the_repetition(queries: int, chunk: int) -> None:
    model, ids = llama(), prompts(1)[0]
    options = SETTINGS | {"queries": queries, "chunk": chunk}
    with torch.no_grad(), mp.compress(model, "attention_matching", 9, **options) as cache:
        assert cache.rebuilder is not None
        measure, probes = cache.rebuilder.measure, []
        cache.rebuilder.measure = lambda caches: probes.extend(measure(caches)) or probes  # type: ignore
        model(ids, cache=cache)
    kept = probes[0].queries(0)
    assert kept is not None
    q, at = kept
    n = ids.shape[1]
    total = sum(min(chunk, n - begin) + len(ASK) for begin in range(0, n, chunk))
    assert q.shape[1] == len(at)
    assert len(at) == total if queries > total else 1 <= len(at) <= queries + -(-n // chunk)
    assert int(at.min()) >= n


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.windows])
def test_windows(name: str) -> None:
    model, ids = shared_model(name), text(1, 30)
    with torch.no_grad(), mp.compress(model, "attention_matching", 9, **SETTINGS) as cache:
        model(ids, cache=cache)
        masses = [layer.read(0).log_masses for layer in cache.layer_caches]
        assert any(found is not None and bool(found.any()) for found in masses)
        assert all(found is not None and bool(found.isfinite().all()) for found in masses)
        assert model(ids[:, :3], cache=cache).logits.isfinite().all()
        cache.check_integrity()


def test_latents_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"its keys too; use 'kvzip'"):
        mp.compress(shared_model("deepseek_v3"), "attention_matching", 9, **SETTINGS)


def test_options() -> None:
    with pytest.raises(OptionError, match="queries=0 must be 1 to 8,192"):
        METHODS.get("attention_matching")(queries=0)
    with pytest.raises(OptionError, match="masses=false and values=false leave nothing to fit; use kvzip"):
        METHODS.get("attention_matching")(masses=False, values=False)
    with pytest.raises(OptionError, match="ridge"):
        MatchAttention(ridge=0)
    with pytest.raises(OptionError, match=r"most=0\.5 must be at least 1"):
        MatchAttention(most=0.5)
