"""Real dropping equals an independent mask over the full cache: float64, 40 steps, padded and unpadded."""

from typing import Any

import pytest
import torch

import millpond as mp
from tests.helpers.matrix.hidden import equals_a_mask
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.matrix.oracle import Oracle, Rule

STEPS = 40

CASES: dict[str, tuple[str, dict[str, Any], int | str, Rule]] = {
    "full": ("full", {}, 0, Rule("newest", 10**6)),
    "h2o": ("h2o", {"sinks": 2}, 12, Rule("sum", 12, sinks=2, recent=0.5)),
    "h2o_heavy_only": ("h2o", {"sinks": 0, "recent": 0}, 10, Rule("sum", 10)),
    "h2o_ratio": ("h2o", {"sinks": 1, "recent": 0.25}, "40%", Rule("sum", 0.4, sinks=1, recent=0.25)),
    "h2o_decay": ("h2o", {"sinks": 2, "decay": 0.8}, 12, Rule("sum", 12, sinks=2, recent=0.5, decay=0.8)),
    "window": ("window", {"sinks": 1}, 9, Rule("newest", 9, sinks=1)),
    "streaming_absolute": ("streaming", {"sinks": 3, "positions": "absolute"}, 9, Rule("newest", 9, sinks=3)),
    "tova": ("tova", {}, 11, Rule("last", 11, shared=True)),
    "snapkv": (
        "snapkv",
        {"window": 4, "kernel": 3},
        12,
        Rule("window", 12, recent=4, window=4, kernel=3, evicts_while_decoding=False),
    ),
    "ada": ("ada", {"alpha": 0.3, "score": "h2o", "every": 0}, 14, Rule("sum", 14, sinks=4, recent=0.5, alpha=0.3)),
}


@pytest.mark.covering
@pytest.mark.parametrize("heads", ["mha", "gqa"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_drop_equals_mask(case: str, batch: int, heads: str) -> None:
    method, options, budget, rule = CASES[case]
    model = llama(heads)
    ids, mask = prompts(batch)
    oracle = Oracle(rule)
    kwargs: dict[str, Any] = {} if method == "full" else {"budget": budget}
    with torch.no_grad(), mp.compress(model, method=method, page_slots=4, **kwargs, **options) as cache:
        equals_a_mask(model, cache, ids, mask, STEPS, oracle)
        for (layer, b, h), head in oracle.heads.items():
            assert cache.positions(layer, b)[h] == head.kept
        cache.check_integrity()
