"""Q-Filters by hand: directions from a singular value decomposition, scores, filters of a file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import millpond as mp
from millpond.errors import CacheMismatchError, NumericsError, OptionError, UnsupportedModelError
from millpond.hf.offline import save_filters
from millpond.methods import METHODS
from millpond.methods.qfilters import QueryFilter, query_directions
from millpond.policy.scores.query_moments import QueryMoments, QueryView
from tests.helpers.hf.families import left_padded, shared_model
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.keyed import best, run, sets, text, view

qfilters = METHODS.get("qfilters")


def test_by_hand() -> None:
    """Queries (3, 4), (6, 8) and (-3, -4) lie on one line; their mean points along (3, 4) / 5."""
    q = torch.tensor([[[3.0, 4.0], [6.0, 8.0], [-3.0, -4.0]]])
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-5.0, 0.0], [1.0, 1.0]]])
    plain = view(keys)
    shown = QueryView(**{f.name: getattr(plain, f.name) for f in fields(plain)} | {"moments": QueryMoments.of(q)})
    assert QueryFilter().score(shown, 0)[0].tolist() == pytest.approx([0.6, 0.8, -3.0, 1.4])
    given = QueryFilter(torch.tensor([[[-3.0, 2.0]]]))
    assert given.score(plain, 0)[0].tolist() == [-3, 2, 15, -1]


@pytest.mark.parametrize("seed", range(3))
def test_directions_against_a_singular_value_decomposition(seed: int) -> None:
    """Two KV heads of two query heads, each decomposed on its own."""
    q = torch.randn(4, 30, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    found = query_directions(QueryMoments.of(q), 2)
    for g in range(2):
        filters = []
        for h in (2 * g, 2 * g + 1):
            direction = torch.linalg.svd(q[h], full_matrices=False)[2][0]
            filters.append(direction if float((q[h] @ direction).mean()) > 0 else -direction)
        assert torch.allclose(found[g], (filters[0] + filters[1]) / 2, atol=1e-10)


@pytest.mark.parametrize("decode", ["grow", "evict"])
def test_kept_sets_against_a_plain_computation(decode: str) -> None:
    """The prompt of 30 alone decides, or every step with all queries so far."""
    q, k, v = text(heads=2, n=36)
    cache = run(qfilters(recent=1, decode=decode), 10, q, k, v, prompt=30)
    for h, kept in enumerate(sets(cache)):
        held: list[int] = list(range(30))
        for t in [30, *(range(31, 37) if decode == "evict" else [])]:
            held = held if t == 30 else [*held, t - 1]
            direction = torch.linalg.svd(q[h, :t], full_matrices=False)[2][0]
            direction = direction if float(q[h, :t].mean(0) @ direction) > 0 else -direction
            value = [float(k[h, j] @ direction) for j in held]
            held = [held[i] for i in best(value, 10, {len(held) - 1})]
        assert kept == (held if decode == "evict" else held + list(range(30, 36)))


def test_filters_of_a_file_are_those_of_its_prompts(tmp_path: Path) -> None:
    """Filters found on a padded batch, written and read: the sums of all prompts, one prompt's own alone."""
    model, (ids, mask) = llama("gqa"), prompts(3)
    kept, path = [], tmp_path / "filters.safetensors"
    with torch.no_grad(), mp.compress(model, "qfilters", "100%") as cache:
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), cache=cache)
        save_filters(cache, path)
        total = cache.layer_caches[1].moments(0) + cache.layer_caches[1].moments(1) + cache.layer_caches[1].moments(2)
        assert total.count == int(mask.sum())
        (found,) = load_file(path).values()
        assert found.shape == (2, 2, 8)
        assert torch.allclose(found[1].double(), query_directions(total, 2), atol=1e-6)
    save_file({"any_name": -found}, tmp_path / "turned.safetensors")
    for options in ({"filters": str(path)}, {"filters": str(tmp_path / "turned.safetensors"), "flip": True}):
        with torch.no_grad(), mp.compress(model, "qfilters", 10, **options) as cache:
            model(ids[:1], cache=cache)
            kept.append([cache.positions(layer) for layer in (0, 1)])
            with pytest.raises(CacheMismatchError, match="has summed no queries"):
                save_filters(cache, path)
    assert kept[0] == kept[1]
    keys: dict[int, torch.Tensor] = {}
    with torch.no_grad(), mp.compress(model, "full") as cache:
        cache.watch(lambda layer, q, k, *rest: keys.update({layer: k[0]}))
        model(ids[:1], cache=cache)
    for layer in (0, 1):
        for g in range(2):
            assert kept[0][layer][g] == best((keys[layer][g] @ found[layer, g].double()).tolist(), 10)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="flip turns the filters of a file round"):
        qfilters(flip=True)
    with pytest.raises(OptionError, match="cannot be read as a"):
        qfilters(filters=str(tmp_path / "none.safetensors"))
    (tmp_path / "text.safetensors").write_text("not tensors")
    with pytest.raises(OptionError, match="cannot be read as a"):
        qfilters(filters=str(tmp_path / "text.safetensors"))
    save_file({"a": torch.ones(2, 3)}, tmp_path / "flat.safetensors")
    with pytest.raises(OptionError, match=r"must hold one tensor .* it has \[\(2, 3\)\]"):
        qfilters(filters=str(tmp_path / "flat.safetensors"))
    save_file({"a": torch.ones(1, 2, 8)}, tmp_path / "short.safetensors")
    tiny, (ids, _) = llama("gqa"), prompts(1)
    with (
        torch.no_grad(),
        mp.compress(tiny, "qfilters", 10, filters=str(tmp_path / "short.safetensors")) as cache,
        pytest.raises(CacheMismatchError, match="the filters are of 1 layers with 2 x 8"),
    ):
        tiny(ids, cache=cache)
    model = shared_model("deepseek_v3")
    with (
        torch.no_grad(),
        mp.compress(model, "qfilters", 10) as cache,
        pytest.raises(UnsupportedModelError, match=r"stores latents \(MLA\)"),
    ):
        model(**left_padded([40]), cache=cache)


def test_nan_queries_are_reported() -> None:
    q, k, v = text()
    q[1, 5] = float("nan")
    with pytest.raises(NumericsError, match="layer 0"):
        run(qfilters(), 12, q, k, v)
