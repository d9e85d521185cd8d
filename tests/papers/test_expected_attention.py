"""Expected Attention by hand: the Gaussian of the queries, the mean rotation, scores; exact queries of real models."""

from __future__ import annotations

import math
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import millpond as mp
from millpond.errors import NumericsError, OptionError, UnsupportedModelError
from millpond.kernels.linear import FEW_ROWS
from millpond.methods import METHODS
from millpond.methods.expected_attention import ExpectedAttentionScore
from millpond.policy.policy import Policy
from millpond.policy.scores.query_moments import QueryMoments, QueryView, mean_rotation
from millpond.policy.view import View
from tests.helpers.hf.families import build, family, one, shared_model
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.keyed import best, run, sets, text, view

expected_attention = METHODS.get("expected_attention")


def look(keys: Tensor, queries: Tensor, values: Tensor, **more: Any) -> QueryView:
    """A view of keys and values, after queries (Hq, n, D)."""
    plain: View = view(keys, values)
    shown = {part.name: getattr(plain, part.name) for part in fields(plain)}
    return QueryView(**(shown | {"moments": QueryMoments.of(queries), **more}))


def turn(angle: float) -> Tensor:
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """One pair of numbers, a tenth of a radian per position."""
    turned = [torch.einsum("ij,bhj->bhi", turn(0.1 * int(p)), x[:, :, i]) for i, p in enumerate(positions[0])]
    return torch.stack(turned, 2)


def test_moments_add_up() -> None:
    q = torch.tensor([[[1.0, 0.0], [3.0, 2.0], [2.0, 4.0]]])
    whole, parts = QueryMoments.of(q), QueryMoments.of(q[:, :1]) + QueryMoments.of(q[:, 1:])
    for moments in (whole, parts):
        assert moments.count == 3
        assert moments.mean.tolist() == [[2, 2]]
        assert torch.allclose(moments.covariance, torch.tensor([[[2 / 3, 2 / 3], [2 / 3, 8 / 3]]], dtype=torch.float64))
    none = QueryMoments.of(q[:, :0])
    assert none.mean.tolist() == [[0, 0]]
    assert not none.covariance.any()


@pytest.mark.parametrize("n", [1, 3, 200])
def test_mean_rotation(n: int) -> None:
    mean = sum(turn(0.1 * t) for t in range(5, 5 + n)) / n
    assert torch.allclose(mean_rotation(rotate, 2, 5, n, torch.device("cpu")), torch.as_tensor(mean))
    assert mean_rotation(None, 2, 5, n, torch.device("cpu")).tolist() == [[1, 0], [0, 1]]


def test_scores_by_hand() -> None:
    """One head, queries (1, 0) and (3, 0): mu = (2, 0), Sigma = diag(1, 0); keys (0, 5), (1, 0), (2, 0); scale 1/2."""
    keys = torch.tensor([[[0.0, 5.0], [1.0, 0.0], [2.0, 0.0]]])
    values = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]]])
    shown = look(keys, torch.tensor([[[1.0, 0.0], [3.0, 0.0]]]), values, scale=0.5)
    z = [math.exp(0), math.exp(1 + 1 / 8), math.exp(2 + 4 / 8)]
    a = [x / sum(z) for x in z]
    score = ExpectedAttentionScore()
    assert score.score(shown, 0)[0].tolist() == pytest.approx([a[0], 2 * a[1], 5 * a[2]])
    assert replace(score, eps=0.1).score(shown, 0)[0].tolist() == pytest.approx(
        [a[0] + 0.1, 2 * (a[1] + 0.1), 5 * (a[2] + 0.1)]
    )
    assert replace(score, value_norms=False).score(shown, 0)[0].tolist() == pytest.approx(a)
    only_mean = replace(score, covariance=False, value_norms=False).score(shown, 0)[0].tolist()
    assert only_mean == pytest.approx([math.exp(x) / (1 + math.e + math.e**2) for x in (0, 1, 2)])
    pinned = replace(shown, pinned=torch.tensor([[False, False, True]]))  # it takes no part in the softmax
    assert replace(score, value_norms=False).score(pinned, 0)[0, :2].tolist() == pytest.approx(
        [x / (z[0] + z[1]) for x in z[:2]]
    )


def test_all_protected_is_no_nan() -> None:
    shown = look(torch.ones(1, 3, 2), torch.ones(1, 4, 2), torch.ones(1, 3, 2), pinned=torch.ones(1, 3).bool())
    assert ExpectedAttentionScore().score(shown, 0).tolist() == [[0, 0, 0]]


def test_groups_are_reduced_after_the_softmax() -> None:
    keys = torch.tensor([[[1.0], [-1.0]]])
    shown = look(keys, torch.tensor([[[2.0]], [[-1.0]]]), keys)  # one query each: no spread
    p = [1 / (1 + math.exp(-4)), 1 / (1 + math.exp(2))]
    for how, expected in (("mean", [sum(p) / 2, 1 - sum(p) / 2]), ("max", [max(p), 1 - min(p)])):
        found = ExpectedAttentionScore(reduce=how, value_norms=False).score(shown, 0)  # type: ignore[arg-type]
        assert found[0].tolist() == pytest.approx(expected)


def plain_scores(q: Tensor, k: Tensor, v: Tensor, turned: Tensor, scale: float) -> list[float]:
    """Of one head of a group of heads: queries (group, n, D), keys and values (n, D), entry by entry."""
    total = [0.0] * len(k)
    for queries in q:
        mean = queries.mean(0)
        spread = (queries - mean).T @ (queries - mean) / len(queries)
        mean, spread = turned @ mean, turned @ spread @ turned.T
        z = [math.exp(float(scale * key @ mean + scale**2 * key @ spread @ key / 2)) for key in k]
        total = [t + x / sum(z) / len(q) for t, x in zip(total, z, strict=True)]
    return [t * math.sqrt(float(x @ x)) for t, x in zip(total, v, strict=True)]


def test_one_layer_against_a_plain_computation() -> None:
    q, k, v = text(heads=2, n=40)
    q, k = 0.7 * q, 0.7 * k
    kept = sets(run(expected_attention(sinks=0), 12, q, k, v))
    for h in range(2):
        value = plain_scores(q[h][None], k[h], v[h], torch.eye(6, dtype=torch.float64), 1.0)
        assert kept[h] == best(value, 12)


def rotation_matrix(position: int, dim: int = 8, base: float = 10000.0) -> Tensor:
    """Of a Llama, from the definition: numbers i and i + dim / 2 turn by position / base^(2 i / dim)."""
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    for i in range(dim // 2):
        angle = position / base ** (2 * i / dim)
        a, b = i, i + dim // 2
        matrix[a, a] = matrix[b, b] = math.cos(angle)
        matrix[a, b], matrix[b, a] = -math.sin(angle), math.sin(angle)
    return matrix


@pytest.mark.parametrize("chunk", [40, 16])
def test_a_model_against_its_own_projections(chunk: int) -> None:
    """Queries and keys from the linear maps, rotations from their definition."""
    model, (ids, _) = llama("gqa"), prompts(1)
    n, budget, sinks, future = 40, 12, 3, 7
    found: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    hooks = [
        getattr(layer.self_attn, f"{name}_proj").register_forward_hook(
            lambda *a, name=name: found[name].append(a[2][0].detach())
        )
        for layer in model.model.layers
        for name in "qkv"
    ]
    weights = [(p, p.clone()) for layer in model.model.layers for p in (layer.self_attn.q_proj.weight,)]
    try:
        with torch.no_grad():
            for p, _ in weights:
                p *= 0.3  # a flatter softmax, so that no score vanishes
            model(ids)
            for hook in hooks:
                hook.remove()
            with mp.compress(
                model, "expected_attention", budget, future=future, sinks=sinks, between_chunks=False
            ) as cache:
                for start in range(0, n, chunk):
                    model(ids[:, start : start + chunk], cache=cache)
                model(ids[:, :1], cache=cache)
                kept = [[[p for p in head if p < n] for head in cache.positions(layer)] for layer in (0, 1)]
    finally:
        with torch.no_grad():
            for p, before in weights:
                p.copy_(before)
    turns = [rotation_matrix(t) for t in range(n + future)]
    ahead = torch.stack(turns[n:]).mean(0)
    for layer in (0, 1):
        q, k, v = (found[name][layer].view(n, -1, 8).transpose(0, 1) for name in "qkv")
        for g in range(2):
            keys = torch.stack([turns[t] @ k[g, t] for t in range(n)])
            own = q[4 * g : 4 * g + 4, sinks:]
            value = [9e9] * sinks + plain_scores(own, keys[sinks:], v[g, sinks:], ahead, 8**-0.5)
            assert kept[layer][g] == best(value, budget, set(range(sinks)))


LENGTH = FEW_ROWS + 8  # a pass of fewer tokens rotates in native layers, where nothing catches it
FAMILIES = ["llama", "mistral", "qwen3", "gpt_neox", "gemma3", "gpt_oss", "cohere", "stablelm", "phi", "phi3", "gpt2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_queries_before_rope_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model hands to its own rotation, caught there."""
    check_unrotated(shared_model(name), monkeypatch, has_rope=family(name).rotary)


def check_unrotated(model: Any, monkeypatch: pytest.MonkeyPatch, has_rope: bool = True) -> None:
    raw: list[Tensor] = []
    used: dict[int, Tensor] = {}
    policy = Policy(score=ExpectedAttentionScore(future=3))
    with torch.no_grad(), mp.compress(model, policy, 6) as cache:
        if has_rope:
            attention = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
            home = sys.modules[type(attention).__module__]
            before = home.apply_rotary_pos_emb  # type: ignore[attr-defined]

            def spy(q: Tensor, *args: Any, **kwargs: Any) -> Any:
                raw.append(q[0].double())
                return before(q, *args, **kwargs)

            monkeypatch.setattr(home, "apply_rotary_pos_emb", spy)
        cache.watch(lambda layer, q, *rest: used.update({layer: q[0].double()}))
        model(**one(LENGTH), cache=cache)
        turned = 0
        for layer_cache in cache.layer_caches:
            queries = used[layer_cache.index]
            if layer_cache.attention.rotary is not None:
                part = raw[turned]
                turned += 1
                queries = torch.cat([part, queries[..., part.shape[-1] :]], -1)
            expected = QueryMoments.of(queries)
            assert layer_cache.moments(0).count == LENGTH
            assert torch.allclose(layer_cache.moments(0).mean, expected.mean, atol=1e-5)
            assert torch.allclose(layer_cache.moments(0).covariance, expected.covariance, atol=1e-4)
        assert turned == len(raw)
        assert (turned > 0) == has_rope


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("Cohere2", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
        ("SmolLM3", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
    ],
)
def test_layers_without_rope_are_left_as_they_are(
    config: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert hasattr(transformers, f"{config}Config")
    model = build(f"{config}Config", f"{config}ForCausalLM", **common, **options)
    with mp.compress(model, "expected_attention", 6) as cache:
        assert [layer_cache.attention.rotary is not None for layer_cache in cache.layer_caches] == [True, False]
    check_unrotated(model, monkeypatch)


def test_what_cannot_be_turned_back_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"stores latents \(MLA\).*use a method that scores by attention"):
        mp.compress(shared_model("deepseek_v3"), "expected_attention", 12)
    dynamic = family("llama").make(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match=r"more than its own position.*cannot be undone"):
        mp.compress(dynamic, "expected_attention", 12)
    with pytest.raises(OptionError, match="future=0 must be 1 to 4,096"):
        expected_attention(future=0)
    with pytest.raises(OptionError, match=r"eps=-1.0 must be 0 to 1,000,000"):
        expected_attention(eps=-1.0)
    with pytest.raises(OptionError, match='needs positions="absolute"'):
        Policy(score=ExpectedAttentionScore(), positions="cache_relative")


def test_a_second_turn_adds_its_queries_and_a_reset_forgets() -> None:
    model, (ids, _) = llama("gqa"), prompts(1)
    with torch.no_grad(), mp.compress(model, "expected_attention", 12, sinks=2) as cache:
        model(ids[:, :25], cache=cache)
        assert cache.layer_caches[0].moments(0).count == 23
        model(ids[:, 25:], cache=cache)
        assert cache.layer_caches[0].moments(0).count == 38
        cache.reset()
        model(ids[:, :9], cache=cache)
        assert cache.layer_caches[0].moments(0).count == 7


def test_nan_queries_are_reported() -> None:
    q, k, v = text()
    q[0, 3] = float("nan")
    with pytest.raises(NumericsError, match="layer 0"):
        run(expected_attention(sinks=0), 12, q, k, v)


def test_with_head_budgets_the_total_stays() -> None:
    model, (ids, _) = llama("gqa"), prompts(1)
    with torch.no_grad(), mp.compress(model, "ada", 12, score="expected_attention/eps=0.02/future=5") as cache:
        model(ids, cache=cache)
        assert [sum(map(len, cache.positions(layer))) for layer in (0, 1)] == [24, 24]
