"""What is passed from function to function goes down: a file that it has left, it seldom comes back to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import millpond as mp
from millpond.cache.layer.layer_cache import LayerCache
from millpond.hf.calibration.measure import calibrate
from millpond.hf.model_profile import ModelProfile
from tests.helpers.hf.families import VOCABULARY, family
from tests.helpers.walk import Stay, files, returns, together, walk


def walks(model: PreTrainedModel) -> Iterator[list[Stay]]:
    """Of the model into `compress`, by every branch that asks something of its own about it."""
    text = torch.randint(VOCABULARY, (512,), generator=torch.Generator().manual_seed(0))
    settings: dict[str, dict[str, Any]] = {
        "streaming": {},
        "expected_attention": {},
        "sirllm": {},
        "kvzip": {"ask": "5;6"},
        "attention_matching": {"ask": "5;6"},
        "h2o": {"codec": "int4"},
        "snapkv": {"codec": "kvquant4", "calibration": calibrate(model, text, bits=(4,), windows=2, length=256)},
    }

    def carries(value: Any) -> bool:
        return value is model or value is model.config or isinstance(value, ModelProfile)

    for method, options in settings.items():
        yield walk(lambda m=method, o=options: mp.compress(model, m, budget=64, **o).close(), carries)


@pytest.mark.filterwarnings("ignore::millpond.hf.generation.UnusedCacheWarning")
def test_a_model_goes_down_into_compress() -> None:
    """27 returns in 43 stays before models were read once (2026-11)."""
    model = family("llama").make(hidden_size=64)
    stays = together(walks(model))
    assert {"hf/compress.py", "hf/model_profile.py", "hf/signals/rotary.py", "hf/cache.py"} <= {s.file for s in stays}
    assert returns(stays) <= 8, stays


def passes(model: Any) -> Iterator[tuple[str, list[Stay]]]:
    """Of attention's queries into the cache of a layer: what kind of pass it is, and its walk above the kernels."""
    ids = torch.randint(VOCABULARY, (1, 303), generator=torch.Generator().manual_seed(0))
    methods: dict[str, dict[str, Any]] = {
        "full": {"budget": None},
        "h2o": {"codec": "int4"},
        "streaming": {},
        "expected_attention": {},
        "ada": {},
        "fastgen": {"special": "0", "punctuation": "1"},
        "kvzip": {"ask": "5;6"},
        "attention_matching": {"ask": "5;6"},
        "infllm": {"budget": 170},
        "minference": {"budget": None},
        "rkv": {},
        "cam": {},
    }
    own, met = LayerCache.attend, []

    def attend(layer: LayerCache, q: Tensor, *more: Any) -> Tensor:
        def carries(value: Any) -> bool:
            return isinstance(value, Tensor) and value.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()

        out: list[Tensor] = []
        stays = walk(lambda: out.append(own(layer, q, *more)), carries)
        kind = "decode" if q.shape[2] == 1 else "prompt"
        met.append((kind, [stay for stay in stays if not stay.file.startswith("kernels/")]))
        return out[0]

    with patch.object(LayerCache, "attend", attend), torch.inference_mode():
        for method, options in methods.items():
            with mp.compress(model, method, **{"budget": 48, **options}) as cache:
                for first, last in ((0, 200), (200, 300), (300, 301), (301, 302), (302, 303)):
                    model(ids[:, first:last], cache=cache)
    yield from met


@pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.FewEntriesWarning")
def test_queries_go_down_into_a_layer_s_cache() -> None:
    """A pass by any method comes back at most once; all branches together twice, to the retrieval of blocks."""
    found = list(passes(family("llama").make(hidden_size=64, num_hidden_layers=1, max_position_embeddings=512)))
    assert max(returns(stays) for _, stays in found) <= 1
    for kind in ("prompt", "decode"):
        whole = together(stays for other, stays in found if other == kind)
        assert "cache/layer/layer_cache.py" in files(whole)
        assert returns(whole) <= 2, whole


def test_a_walk_counts_files_that_it_comes_back_to() -> None:
    down = [Stay("a", "f", 0), Stay("a", "g", 1), Stay("b", "h", 2), Stay("c", "i", 1)]
    assert returns(down) == 0
    assert returns([*down, Stay("b", "h", 1), Stay("c", "i", 2)]) == 2
    assert together([down, down[:2]]) == down
