"""Methods that merge: every check of the matrix, an independent simulation, and equal entries merged without loss."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import millpond as mp
from tests.helpers.matrix.checks import CHECKS
from tests.helpers.matrix.hidden import passes, steps_after
from tests.helpers.matrix.merged import Merging, Plain, into_classes, into_nearest, into_next, into_pivots, recall
from tests.helpers.matrix.models import llama, prompts
from tests.matrix import test_invariance as matrix
from tests.matrix import test_layer_budgets as layered

OPTIONS: dict[str, dict[str, Any]] = {
    "merge_on_evict": {"score": "h2o/sinks=2"},
    "kvmerger": {"decode": "merge"},
    "cam": {"targets": 3, "sinks": 2},
    "ems": {"window": 4, "threshold": 0.1, "every": 1},
}


@pytest.mark.covering
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("method", OPTIONS)
def test_matrix(method: str, bias: bool, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, method, {**OPTIONS[method], "mass_bias": bias})
    CHECKS[check](method)


BUDGET = 14
#: The method, its options, and the same in plain words.
CASES: dict[str, tuple[str, dict[str, Any], Plain]] = {
    "merge_on_evict": (
        "merge_on_evict",
        {"score": "h2o/sinks=2", "threshold": 0.2},
        Plain("heavy", into_nearest, BUDGET, sinks=2, recent=0.5, settings={"threshold": 0.2}),
    ),
    "merge_on_evict_bias": (
        "merge_on_evict",
        {"score": "h2o/sinks=2", "mass_bias": True, "every": 3},
        Plain("heavy", into_nearest, BUDGET, sinks=2, recent=0.5, every=3, bias=True, settings={"threshold": 0.0}),
    ),
    "kvmerger": (
        "kvmerger",
        {"recent": 0.3, "top": 0.3},
        Plain("pivots", into_pivots, BUDGET, recent=0.3, grows=True, settings={"top": 0.3}),
    ),
    "kvmerger_eps": (
        "kvmerger",
        {"recent": 0.3, "top": 0.1, "eps": 0.1},
        Plain("pivots", into_pivots, 36, recent=0.3, grows=True, settings={"top": 0.1, "eps": 0.1}),
    ),
    "kvmerger_bias": (
        "kvmerger",
        {"recent": 0.3, "top": 0.3, "decode": "merge", "mass_bias": True},
        Plain("pivots", into_pivots, BUDGET, recent=0.3, bias=True, settings={"top": 0.3}),
    ),
    "cam": ("cam", {"targets": 3, "sinks": 2}, Plain("newest", into_next, BUDGET, sinks=2, settings={"targets": 3})),
    "cam_bias": (
        "cam",
        {"targets": 4, "sinks": 2, "mass_bias": True, "every": 2},
        Plain("newest", into_next, BUDGET, sinks=2, every=2, bias=True, settings={"targets": 4}),
    ),
    "d2o": (
        "d2o",
        {"sinks": 2},
        Plain("heavy", recall, BUDGET, sinks=2, recent=0.5, by_density=True, settings={"rate": 0.7}),
    ),
    "d2o_bias": (
        "d2o",
        {"sinks": 2, "rate": 0.4, "mass_bias": True, "every": 2},
        Plain(
            "heavy", recall, BUDGET, sinks=2, recent=0.5, every=2, bias=True, by_density=True, settings={"rate": 0.4}
        ),
    ),
    "ems": (
        "ems",
        {"window": 4, "threshold": 0.05, "cover": 0.9, "most": 1.0, "every": 1},
        Plain("local", into_classes, BUDGET, window=4, settings={"threshold": 0.05, "cover": 0.9, "most": 1.0}),
    ),
    "ems_bias": (
        "ems",
        {"window": 4, "threshold": 0.05, "mass_bias": True, "every": 3},
        Plain(
            "local",
            into_classes,
            BUDGET,
            window=4,
            bias=True,
            every=3,
            settings={"threshold": 0.05, "cover": 0.95, "most": 4.0},
        ),
    ),
}


@pytest.mark.covering
@pytest.mark.parametrize("heads", ["mha", "gqa"])
@pytest.mark.parametrize("case", CASES)
def test_equals_plain_merging(case: str, heads: str) -> None:
    """Outputs and positions over a padded prompt and ten steps; scores and log masses are float32, all else float64."""
    method, options, plain = CASES[case]
    model, (ids, mask) = llama(heads), prompts(2)
    oracle = Merging(plain)
    with torch.no_grad(), mp.compress(model, method, plain.budget, page_slots=4, **options) as cache:
        for t, (error, most) in enumerate(passes(model, cache, oracle, steps_after(ids, 10), mask)):
            assert error <= 1e-4 * most, f"step {t}"
            if t or not plain.by_density:
                for layer in range(2):
                    assert [cache.positions(layer, s) for s in (0, 1)] == [oracle.kept(layer, s) for s in (0, 1)]
        cache.check_integrity()


LAYERED: dict[str, dict[str, Any]] = {
    "d2o": {"sinks": 2, "density": "absolute"},
    "d2o_bias": {"sinks": 2, "mass_bias": True},
}


@pytest.mark.covering
@pytest.mark.parametrize("case", LAYERED)
@pytest.mark.parametrize(
    "check",
    [
        lambda case: layered.test_totals_are_exact_alone_and_in_a_batch(case, "40%"),
        layered.test_pages_and_chunks_change_nothing,
        lambda case: layered.test_a_budget_of_everything_equals_full(case, "gqa"),
        layered.test_prompts_and_turns_leave_nothing_behind,
    ],
    ids=["totals", "pages and chunks", "everything", "turns"],
)
def test_layers_that_differ(case: str, check: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layered.METHODS, case, ("d2o", LAYERED[case]))
    check(case)


def placeless(dtype: torch.dtype) -> LlamaForCausalLM:
    """One layer without rotation: equal tokens have equal keys and values wherever they stand."""
    model = deepcopy(llama("gqa", dtype, layers=1))
    model.model.rotary_emb.inv_freq.zero_()
    return model


TWINS: dict[str, tuple[str, dict[str, Any], int]] = {  # with the kinds of tokens in the text
    "merge_on_evict": ("merge_on_evict", {"score": "h2o/sinks=0"}, 5),
    "merge_on_evict_later": ("merge_on_evict", {"score": "h2o/sinks=0", "every": 3}, 5),
    "kvmerger": ("kvmerger", {}, 5),
    "kvmerger_eps": ("kvmerger", {"eps": 0.999}, 5),
    "d2o": ("d2o", {"sinks": 0}, 5),
    "ems": ("ems", {"window": 12, "cover": 1.0, "threshold": 0.99, "every": 1}, 5),
    "cam": ("cam", {"sinks": 1, "targets": 2}, 1),
}


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", TWINS)
def test_equal_entries_merge_without_loss(case: str, dtype: torch.dtype) -> None:
    """With the mass bias generate() says what it says without a budget, and without it something else is computed."""
    method, options, kinds = TWINS[case]
    model, budget = placeless(dtype), 30
    make = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 96, (1, kinds), generator=make)
    ids = torch.cat([ids.repeat_interleave(14, 1), ids.repeat(1, 12 // kinds + 1)[:, :12]], 1)
    common: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 8,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    expected = model.generate(**common)
    errors = {}
    for bias in (True, False):
        with torch.no_grad(), mp.compress(model, method, min(budget, ids.shape[1] - 6), mass_bias=bias, **options) as c:
            found = model.generate(cache=c, **common)
            assert c.stats().evicted > 0
        n = len(expected.logits) if bias else 2
        pairs = zip(expected.logits[:n], found.logits[:n], strict=True)
        errors[bias] = max(float((a - b).abs().max()) for a, b in pairs)
        if bias:
            assert found.sequences.tolist() == expected.sequences.tolist()
    assert errors[True] < 1e-5
    assert errors[False] > 1e-3 or kinds == 1
