"""Requests that must forget nothing: refused before they are read where their method would evict."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.cache.pages.page_table import PageTable
from millpond.errors import OptionError, WouldForgetError
from millpond.policy.head_allocation import AboveThreshold
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import LayerShape

WAY_OUT = "or use on_pressure='evict'"


def answer_without_loss(
    recipe: CacheFactory,
    layers: Sequence[LayerShape],
    n_tokens: int,
    wanted: int | None,
    most: int,
    context: int | None,
) -> int:
    """New tokens that an answer may have while every head of every layer still holds its whole prompt.

    Layers with a sliding window of their own hold what their queries see, as they do without a method.

    Args:
        n_tokens: of the prompt. wanted: `max_tokens` of the request; None: as many as there is room for.
        most: new tokens that it may have otherwise. context: tokens of prompt and answer together; None: no limit.

    Raises:
        WouldForgetError: the prompt alone is more than its budget, or `max_tokens` new tokens would evict
            from it; the message says how much.
        OptionError: what the method evicts does not follow from its budget, or prompt and answer exceed the context.
    """
    if wanted is not None and context is not None and n_tokens + wanted > context:
        raise OptionError(
            f"on_pressure='refuse': {n_tokens:,} tokens of prompt and {wanted:,} new ones are {n_tokens + wanted:,}, "
            f"and the model's context holds {context:,}; lower max_tokens, shorten the prompt, {WAY_OUT}"
        )
    policy = recipe.policy
    if policy.keeps_all:
        return most
    if (reason := _unforeseen(recipe)) is not None:
        raise OptionError(f"on_pressure='refuse': {reason}; use another method, {WAY_OUT}")
    held = _held(recipe, layers, n_tokens)
    if held < n_tokens:
        lost = n_tokens - held
        raise WouldForgetError(
            f"on_pressure='refuse': the prompt has {n_tokens:,} tokens and the budget {recipe.budget} holds {held:,} "
            f"of them per KV head, so that {lost:,} ({lost / n_tokens:.1%}) would be evicted; shorten the prompt, "
            f"raise the budget, {WAY_OUT}"
        )
    if not (policy.every_step or policy.makes_room):
        return most
    free = min(most, held - n_tokens + 1)  # the last token of an answer is not stored
    if wanted is None:
        return min(most, free)
    if wanted > free:
        lost = min(wanted - free, n_tokens)
        raise WouldForgetError(
            f"on_pressure='refuse': the budget {recipe.budget} holds {held:,} entries per KV head, and {n_tokens:,} "
            f"tokens of prompt with {wanted:,} new ones could evict {lost:,} ({lost / n_tokens:.1%}) of the prompt; "
            f"lower max_tokens to {free:,}, raise the budget, {WAY_OUT}"
        )
    return most


def _unforeseen(recipe: CacheFactory) -> str | None:
    """Why it is not known before a prompt is read how much of it stays; None where the budget says it."""
    policy = recipe.policy
    if policy.heads_may_keep_all or policy.needs.head_rules is not None or isinstance(policy.heads, AboveThreshold):
        return f"under {recipe.described} entries leave by rules of their own, whatever the budget holds"
    return None


def _held(recipe: CacheFactory, layers: Sequence[LayerShape], n_tokens: int) -> int:
    """The fewest entries per KV head that a layer may hold behind a text of `n_tokens`; of those with a window, all."""
    found = [
        recipe.entries(index, n_tokens, PageTable(recipe.pool(layer), 1, layer.n_kv_heads))
        for index, layer in enumerate(layers)
        if not layer.window
    ]
    return min(found, default=n_tokens)
