"""Spans of a request's prompt that stay, or keep a share of the budget, checked before anything is read."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.cache.pages.page_table import PageTable
from millpond.cache.state.span_marks import FairShare, fair_refusal, in_order, kept_spans
from millpond.cache.state.spans import Span, tokens_in
from millpond.errors import OptionError
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import LayerShape


def checked_spans(
    spans: Sequence[Span], recipe: CacheFactory, layers: Sequence[LayerShape], n_tokens: int
) -> tuple[Span, ...]:
    """Spans of a prompt of `n_tokens` as its cache keeps them, see `kept_spans`.

    Raises:
        OptionError: no spans of this prompt, or a method that cannot keep them; the message says why.
        BudgetError: they leave less of the budget than the method protects.
    """
    if not spans:
        return ()
    refusal = recipe.policy.kept_refusal()
    if refusal is not None:
        raise OptionError(f"spans cannot be kept: {refusal}")
    if any(codec.ages for codec in recipe.pools.codecs):
        raise OptionError("spans cannot be kept where entries pass through number formats by age; name one format")
    if recipe.reach is not None:
        raise OptionError("spans cannot be kept with overflow='rolling', which moves positions; leave one out")
    found = kept_spans(spans, "keep")
    if found and found[-1][1] > n_tokens:
        raise OptionError(
            f"keep: span [{found[-1][0]}, {found[-1][1]}) must lie in the prompt, whose tokens are 0 to {n_tokens - 1}"
        )
    n_kept = tokens_in(found, recipe.policy.protect.sinks)
    for index, layer in enumerate(layers if n_kept and not recipe.policy.keeps_all else ()):
        recipe.entries(index, n_tokens, PageTable(recipe.pool(layer), 1, layer.n_kv_heads), n_kept)
    return found


def checked_shares(shares: Sequence[FairShare], recipe: CacheFactory, n_tokens: int) -> tuple[FairShare, ...]:
    """Spans of a prompt of `n_tokens` that keep a share of the budget, ascending.

    Raises:
        OptionError: no spans of this prompt, no shares, or a method that cannot; the message says why.
    """
    if not shares:
        return ()
    refusal = fair_refusal(recipe.policy, recipe.pools.codecs, rolling=recipe.reach is not None)
    if refusal is not None:
        raise OptionError(f"spans cannot have a share of the budget: {refusal}")
    found = in_order(shares, "fair_shares")
    if found and found[-1][1] > n_tokens:
        raise OptionError(
            f"fair_shares: span [{found[-1][0]}, {found[-1][1]}) must lie in the prompt, whose tokens are 0 to "
            f"{n_tokens - 1}"
        )
    return found
