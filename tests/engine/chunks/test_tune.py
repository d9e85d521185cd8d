"""Alpha fitted to a bound on the KL divergence: the least that keeps to it."""

from __future__ import annotations

import pytest

import millpond as mp
from millpond.cache.chunks.store import ChunkStore
from millpond.engine.chunks.tune import LEAST, MOST, AlphaTrial, fit_alpha
from millpond.errors import OptionError


def trial(alpha: float) -> AlphaTrial:
    """One whose divergence falls from 0.1 as alpha grows."""
    return AlphaTrial(alpha, max(0.0, 0.1 - 0.1 * alpha), min(alpha, 1.0))


@pytest.mark.parametrize("bound", [0.09, 0.05, 0.02])
def test_the_least_alpha_that_keeps_to_the_bound(bound: float) -> None:
    fit = fit_alpha(trial, bound)
    exact = 1 - bound / 0.1
    assert fit.best.kl <= bound
    assert exact <= fit.best.alpha < 1.05 * exact
    assert fit.best in fit.trials
    assert [one.alpha for one in fit.trials] == sorted(one.alpha for one in fit.trials)


def test_a_bound_that_all_keep_to_and_one_that_none_does() -> None:
    assert fit_alpha(trial, 0.2).best.alpha == LEAST
    with pytest.raises(OptionError, match=f"is not kept even with alpha={MOST:g}"):
        fit_alpha(lambda alpha: AlphaTrial(alpha, 0.5, 0.1), 0.2)


TEXTS = [
    f"{who} {what} " + "quiet rain past meadow and old stone on river " * 3
    for who, what in (("anna", "kettle"), ("peter", "ladder"), ("maria", "basket"), ("simon", "lantern"))
]


def test_a_model_is_measured_and_its_store_keeps_its_alpha() -> None:
    with mp.LLM("pond-recall", method="full", chunk_store=ChunkStore(None, alpha=0.3)) as llm:
        fit = llm.tune_alpha(TEXTS, 0.02, prompts=2, chunks=2, question=8)
        assert llm.engine.config.chunk_store is not None
        assert llm.engine.config.chunk_store.alpha == 0.3
        stored = llm.stats().chunks
        assert stored is not None
        assert stored.stored == len(TEXTS), "what is measured is not kept"
    assert fit.best.kl <= 0.02
    worse = [one for one in fit.trials if one.alpha < fit.best.alpha]
    assert all(one.kl > 0.02 for one in worse)
    assert fit.trials[-1].share > fit.trials[0].share


def test_what_is_refused() -> None:
    with mp.LLM("pond-recall", method="full", chunk_store=ChunkStore(None)) as llm:
        with pytest.raises(OptionError, match="must be a number above 0"):
            llm.tune_alpha(TEXTS, 0)
        with pytest.raises(OptionError, match="must be a number above 0"):
            llm.tune_alpha(TEXTS, float("nan"))
        with pytest.raises(OptionError, match="need more than 4 texts, and there are 4"):
            llm.tune_alpha(TEXTS, 0.1)
    with mp.LLM("pond-recall", method="full") as llm, pytest.raises(OptionError, match="this engine has none"):
        llm.tune_alpha(TEXTS, 0.1)
