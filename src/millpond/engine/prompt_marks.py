"""Marks of a request's prompt, checked before anything is read: spans, breakpoints, and that nothing is evicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from millpond.cache.pages.page_table import PageTable
from millpond.cache.state.span_marks import fair_refusal, kept_refusal
from millpond.errors import OptionError, WouldForgetError
from millpond.hf.forget import forget_refusal
from millpond.policy.head_allocation import AboveThreshold
from millpond.prompt_marks import MAX_BREAKPOINTS, PromptMarks, tokens_in
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import LayerShape


def check_marks(
    marks: PromptMarks, cache_factory: CacheFactory, layers: Sequence[LayerShape], n_tokens: int, has_chunks: bool
) -> None:
    """Check what a request marks of its prompt of `n_tokens`.

    Args:
        layers: of the model. has_chunks: whether the prompt holds chunks.

    Raises:
        OptionError: marks that do not lie in the prompt, or a method, model or prompt that cannot treat them so; the
            message says why.
        BudgetError: what stays leaves less of the budget than the method protects.
    """
    marks.in_prompt(n_tokens)
    refused = refusals(cache_factory, has_chunks)
    for kind, (what, way_out) in _REFUSED.items():
        if getattr(marks, kind) and (reason := refused[kind]) is not None:
            raise OptionError(f"{what}: {reason}{way_out}")
    n_kept = tokens_in(marks.keep, cache_factory.policy.protect.sinks)
    for index, layer in enumerate(layers if n_kept and not cache_factory.policy.keeps_all else ()):
        cache_factory.entries(index, n_tokens, PageTable(cache_factory.pool(layer), 1, layer.n_kv_heads), n_kept)


#: What a message says of a kind of spans that cannot be, and what it adds to the reason.
_REFUSED = {
    "keep": ("spans cannot be kept", ""),
    "shares": ("spans cannot have a share of the budget", ""),
    "forget": ("forget", "; or leave the text of the spans out of the prompt"),
}


def refusals(cache_factory: CacheFactory, has_chunks: bool) -> dict[str, str | None]:
    """Why a cache cannot treat spans of a prompt so, and what to do instead, by the fields of `PromptMarks`; None: it
    can. What is not here every cache can.
    """
    codecs, rolling = cache_factory.pools.codecs, cache_factory.reach is not None
    return {
        "keep": kept_refusal(cache_factory.policy, codecs, rolling),
        "shares": fair_refusal(cache_factory.policy, codecs, rolling),
        "forget": _forget_refusal(cache_factory, has_chunks),
    }


def _forget_refusal(cache_factory: CacheFactory, has_chunks: bool) -> str | None:
    if cache_factory.slots is not None:
        return "this model's recurrent states hold the whole text, and a span cannot be taken out of them"
    if cache_factory.reach is not None:
        return "overflow='rolling' moves positions; leave one of the two out"
    if has_chunks:
        return "a prompt with chunks is not read in its order; give its text without Chunk"
    if (reason := forget_refusal(cache_factory.policy)) is not None:
        return reason
    if cache_factory.whole_prompt:
        return "this method reads a prompt in one pass, in which later tokens see the span; use another method"
    return None


#: Prompts that wait with which a prompt is compared when it begins.
MOST_COMPARED = 64


def block_ends(places: Iterable[int], n_tokens: int, slots: int) -> list[int]:
    """The last ends of blocks of `slots` tokens at or before `places` of a prompt of `n_tokens`, ascending.

    Example:
        >>> block_ends([3, 9, 10, 12], 12, 4)
        [8]
    """
    return sorted({min(place, n_tokens - 1) // slots * slots for place in places} - {0})


def common_ends(prompt: np.ndarray, others: Sequence[np.ndarray], slots: int) -> list[int]:
    """Where others go on from what a prompt begins with: the ends that spare them most tokens, ascending.

    Args:
        prompt: (n,) its tokens. others: for each other prompt, as many of its tokens as it may take over.
        slots: tokens of a block.
    """
    found: list[int] = []
    for other in others[:MOST_COMPARED]:
        most = min(len(other), len(prompt) - 1) // slots * slots
        if most and (other[:slots] == prompt[:slots]).all():
            differs = other[:most] != prompt[:most]
            found.append((int(differs.argmax()) if differs.any() else most) // slots * slots)
    spared = {end: end * sum(one >= end for one in found) for end in set(found)}
    return sorted(sorted(spared, key=lambda end: (-spared[end], end))[:MAX_BREAKPOINTS])


WAY_OUT = "or use on_pressure='evict'"


def answer_without_loss(
    cache_factory: CacheFactory,
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
    policy = cache_factory.policy
    if policy.keeps_all:
        return most
    if (reason := _unforeseen(cache_factory)) is not None:
        raise OptionError(f"on_pressure='refuse': {reason}; use another method, {WAY_OUT}")
    held = _held(cache_factory, layers, n_tokens)
    if held < n_tokens:
        lost = n_tokens - held
        raise WouldForgetError(
            f"on_pressure='refuse': the prompt has {n_tokens:,} tokens and the budget {cache_factory.budget} holds "
            f"{held:,} of them per KV head, so that {lost:,} ({lost / n_tokens:.1%}) would be evicted; shorten the "
            f"prompt, raise the budget, {WAY_OUT}"
        )
    if not (policy.every_step or policy.makes_room):
        return most
    free = min(most, held - n_tokens + 1)  # the last token of an answer is not stored
    if wanted is None:
        return min(most, free)
    if wanted > free:
        lost = min(wanted - free, n_tokens)
        raise WouldForgetError(
            f"on_pressure='refuse': the budget {cache_factory.budget} holds {held:,} entries per KV head, and "
            f"{n_tokens:,} tokens of prompt with {wanted:,} new ones could evict {lost:,} ({lost / n_tokens:.1%}) of "
            f"the prompt; lower max_tokens to {free:,}, raise the budget, {WAY_OUT}"
        )
    return most


def _unforeseen(cache_factory: CacheFactory) -> str | None:
    """Why it is not known before a prompt is read how much of it stays; None where the budget says it."""
    policy = cache_factory.policy
    if policy.heads_may_keep_all or policy.needs.head_rules is not None or isinstance(policy.heads, AboveThreshold):
        return f"under {cache_factory.described} entries leave by rules of their own, whatever the budget holds"
    return None


def _held(cache_factory: CacheFactory, layers: Sequence[LayerShape], n_tokens: int) -> int:
    """The fewest entries per KV head that a layer may hold behind a text of `n_tokens`; of those with a window, all."""
    found = [
        cache_factory.entries(index, n_tokens, PageTable(cache_factory.pool(layer), 1, layer.n_kv_heads))
        for index, layer in enumerate(layers)
        if not layer.window
    ]
    return min(found, default=n_tokens)
