"""Attention-output losses: against a plain computation, under Ada-KV's bound, zero where nothing is evicted."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from millpond.errors import OptionError, UnsupportedModelError
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from millpond_lab.evals.candidates.oracle import Oracle
from millpond_lab.evals.decoding.attention_recorder import RecordedAttention
from millpond_lab.evals.harness.attention_loss import (
    AttentionLosses,
    attention_losses,
    layer_losses,
    method_losses,
    output_matrices,
)
from tests.helpers.examples import examples
from tests.helpers.hf.families import shared_model
from tests.helpers.matrix.models import llama
from tests.lab.evals.test_oracle import OPTIONS, eager, look, prompt, whole

OPENING, BUDGET = 40, 12


def text(seed: int = 0) -> Tensor:
    return torch.tensor(whole(prompt(OPENING, seed=seed)))


def losses(method: Any, seed: int = 0, budget: Any = BUDGET, **options: Any) -> AttentionLosses:
    named = {**OPTIONS.get(method, {}), **options} if isinstance(method, str) else options
    return method_losses(llama("gqa"), text(seed), OPENING, method, budget, **named)


def test_against_a_plain_computation() -> None:
    """Attention by transformers, values from the model's own modules, one query and one head at a time."""
    model, ids = llama("gqa"), tuple(text().tolist())
    kept = [[[0, 3, 5], [1, 2, 3, 30]], [[7], [39]]]
    found = attention_losses(model, torch.tensor(ids), OPENING, kept)
    values: list[Tensor] = []
    projections = [layer.self_attn.v_proj for layer in model.model.layers]
    hooks = [part.register_forward_hook(lambda *a: values.append(a[2][0].detach())) for part in projections]
    eager.cache_clear()
    attentions = eager("gqa", ids)
    for hook in hooks:
        hook.remove()
    n, queries = len(ids), range(OPENING, len(ids))
    for layer, (a, v) in enumerate(zip(attentions, values, strict=True)):
        w = model.model.layers[layer].self_attn.o_proj.weight.detach()
        parts = [(v[:, 8 * (h // 4) :][:, :8], w[:, 8 * h : 8 * h + 8].T) for h in range(8)]
        c = max(float((v_h[j] @ w_h).abs().sum()) for v_h, w_h in parts for j in range(n))
        together = torch.zeros(len(queries), 32, dtype=torch.float64)
        for h, (v_h, w_h) in enumerate(parts):
            visible = [*kept[layer][h // 4], *range(OPENING, n)]
            loss, gone = 0.0, 0.0
            for row, i in enumerate(queries):
                p = a[h, i]
                left = torch.zeros_like(p)
                left[visible] = p[visible]
                gone += 1 - float(left.sum())
                moved = (p - left / left.sum()) @ v_h @ w_h
                together[row] += moved
                loss += float(moved.abs().sum())
            assert float(found.loss[layer, h]) == pytest.approx(loss / len(queries), rel=1e-6)
            assert float(found.evicted[layer, h]) == pytest.approx(gone / len(queries), rel=1e-6)
            assert float(found.bound[layer, h]) == pytest.approx(2 * c * gone / len(queries), rel=1e-6)
        assert float(found.layer_loss[layer]) == pytest.approx(float(together.abs().sum(1).mean()), rel=1e-6)


@pytest.mark.in_turns(0, of=3)
@pytest.mark.parametrize("method", METHODS.names())
def test_no_loss_exceeds_its_bound(method: str) -> None:
    policy = METHODS.get(method)(**OPTIONS.get(method, {}))
    found = losses(method, budget=BUDGET if policy.takes_budget else None)
    assert found.loss.shape == (2, 8)
    if policy.keeps_all:
        assert not any(t.any() for t in (found.loss, found.evicted, found.bound, found.layer_loss))
        return
    assert (found.evicted > 0).all()
    assert (found.loss <= found.bound).all()
    assert (found.layer_loss <= found.layer_bound).all()
    assert (found.layer_loss <= found.loss.sum(1) + 1e-9).all()


@pytest.mark.parametrize("method", ["h2o", "no_heavy", "strided"])
def test_a_budget_of_everything_loses_nothing(method: str) -> None:
    found = losses(method, budget=OPENING)
    assert found.numbers() == {"attention_loss": 0.0, "attention_bound": 0.0, "evicted_attention": 0.0}


@pytest.mark.parametrize("seed", range(4))
def test_heads_that_compete_have_the_lower_bound(seed: int) -> None:
    """With the true attention as score no allocation of the same total has a lower bound than Ada's."""
    tables = look(prompt(OPENING, seed=seed))
    found = {heads: losses(Oracle(heads=heads).policy(tables), seed) for heads in ("ada", "uniform")}  # type: ignore[arg-type]
    h2o = losses("h2o", seed)
    assert (found["ada"].layer_bound <= found["uniform"].layer_bound + 1e-9).all()
    assert (found["uniform"].layer_bound <= h2o.layer_bound + 1e-9).all()
    assert (found["ada"].layer_bound < h2o.layer_bound).all()


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 9999), group=st.integers(1, 3), window=st.sampled_from([0, 5]), sink=st.booleans())
def test_bound_over_random_layers(seed: int, group: int, window: int, sink: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, m, hkv = 20, 6, 2
    q, k, v = (3 * torch.randn(h, t, 4, generator=generator) for h, t in ((hkv * group, m), (hkv, n), (hkv, n)))
    w = torch.randn(hkv * group, 4, 7, generator=generator)
    keep = torch.rand(hkv, n, generator=generator) < 0.4
    keep[:, n - m :] = True
    sinks = torch.randn(hkv * group, generator=generator) if sink else None
    traffic = RecordedAttention(q, k, v, AttentionShape(0.5, window=window, sink_logits=sinks))
    loss, evicted, bound, together = layer_losses(traffic, w, keep)
    assert (loss <= bound + 1e-9).all()
    assert float(together) <= float(bound.sum()) + 1e-9
    assert (evicted >= 0).all()
    assert (evicted <= 1).all()
    nothing = layer_losses(traffic, w, torch.ones_like(keep))
    assert not any(t.any() for t in nothing)


PLACES = {
    "opt": "model.decoder.layers.1.self_attn.out_proj",
    "gpt2": "transformer.h.1.attn.c_proj",
    "gpt_neox": "gpt_neox.layers.1.attention.dense",
    "phi": "model.layers.1.self_attn.dense",
    "gpt_oss": "model.layers.1.self_attn.o_proj",
}


@pytest.mark.parametrize("family", PLACES)
def test_other_families(family: str) -> None:
    """The heads' parts side by side do what the module does, without its bias; and the bound holds."""
    model = shared_model(family)
    w = output_matrices(model)[1]
    linear = model.get_submodule(PLACES[family])
    x = torch.randn(3, w.shape[0] * w.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(x @ w.flatten(0, 1), linear(x) - linear(torch.zeros_like(x)), atol=1e-5)
    found = method_losses(model, text(), OPENING, "h2o", BUDGET)
    assert (found.loss <= found.bound + 1e-9).all()
    assert (found.evicted[1] > 0).all()
    assert not method_losses(model, text(), OPENING, "full").loss.any()


def test_latents_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="caches latents"):
        method_losses(shared_model("deepseek_v3"), text(), OPENING, "h2o", BUDGET)


def test_what_cannot_be_told_is_refused() -> None:
    ids = text()
    with pytest.raises(OptionError, match=r"opening=0 must leave tokens before and behind it"):
        attention_losses(llama("gqa"), ids, 0, [])
    with pytest.raises(OptionError, match=r"kept tells of 1 layers, the model has 2"):
        attention_losses(llama("gqa"), ids, OPENING, [[[0], [0]]])
    model = llama("gqa")
    part = model.model.layers[1].self_attn
    projection, part.o_proj = part.o_proj, None
    try:
        with pytest.raises(UnsupportedModelError, match="found in 1 of 2 attention layers"):
            output_matrices(model)
    finally:
        part.o_proj = projection
