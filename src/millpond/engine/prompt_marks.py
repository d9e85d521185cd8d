"""Marks of a request's prompt, checked before anything is read: spans, breakpoints, and that nothing is evicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

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
    """Check the marks of a prompt of `n_tokens`.

    Args:
        marks: Marks of the request.
        cache_factory: Factory of its cache.
        layers: Layers of the model.
        n_tokens: Tokens of the prompt.
        has_chunks: Whether the prompt holds chunks.

    Raises:
        OptionError: marks outside the prompt, or a method, model or prompt that cannot treat them so; the
            message says why.
        BudgetError: the spans that stay leave less of the budget than the method protects.
    """
    marks.in_prompt(n_tokens)
    reasons = refusals(cache_factory, has_chunks)
    for kind, (problem, way_out) in _REFUSED.items():
        if getattr(marks, kind) and (reason := reasons[kind]) is not None:
            raise OptionError(f"{problem}: {reason}{way_out}")
    n_kept = tokens_in(marks.keep, cache_factory.policy.protect.sinks)
    for index, layer in enumerate(layers if n_kept and not cache_factory.policy.keeps_all else ()):
        cache_factory.entries(index, n_tokens, cache_factory.empty_table(layer), n_kept)


#: Beginning of the message on a kind of spans that is refused, and what the message adds to the reason.
_REFUSED = {
    "keep": ("spans cannot be kept", ""),
    "shares": ("spans cannot have a share of the budget", ""),
    "forget": ("forget", "; or leave the text of the spans out of the prompt"),
}


def refusals(cache_factory: CacheFactory, has_chunks: bool) -> dict[str, str | None]:
    """Return why a cache cannot treat spans of a prompt so, by the fields of `PromptMarks`.

    The texts name the way out. None: it can. Every cache can treat the fields that are left out.
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


#: Most waiting prompts that a prompt is compared with when it begins.
MAX_COMPARED = 64


def block_ends(positions: Iterable[int], n_tokens: int, slots: int) -> list[int]:
    """Return the last ends of blocks of `slots` tokens at or before `positions`.

    They are less than `n_tokens`, the length of the prompt, and ascend.

    Example:
        >>> block_ends([3, 9, 10, 12], 12, 4)
        [8]
    """
    return sorted({min(position, n_tokens - 1) // slots * slots for position in positions} - {0})


def common_ends(prompt: np.ndarray, others: Sequence[np.ndarray], slots: int) -> list[int]:
    """Return the ends of beginnings in common with others that spare these most tokens.

    The ends are those of blocks, and ascend.

    Args:
        prompt: Tokens of the prompt, (n,).
        others: Tokens of each other prompt that it may take over.
        slots: Tokens of a block.
    """
    ends: list[int] = []
    for other in others[:MAX_COMPARED]:
        max_common = min(len(other), len(prompt) - 1) // slots * slots
        if max_common and (other[:slots] == prompt[:slots]).all():
            differs = other[:max_common] != prompt[:max_common]
            ends.append((int(differs.argmax()) if differs.any() else max_common) // slots * slots)
    spared = {end: end * sum(common_end >= end for common_end in ends) for end in set(ends)}
    return sorted(sorted(spared, key=lambda end: (-spared[end], end))[:MAX_BREAKPOINTS])


WAY_OUT = "or use on_pressure='evict'"


def answer_without_loss(
    cache_factory: CacheFactory,
    layers: Sequence[LayerShape],
    n_tokens: int,
    max_tokens: int | None,
    max_new_tokens: int,
    context: int | None,
) -> int:
    """Return the new tokens that an answer may have while every head holds its whole prompt.

    Layers with a sliding window of their own hold what their queries see, as they do without a method.

    Args:
        cache_factory: Factory of the cache.
        layers: Layers of the model.
        n_tokens: Tokens of the prompt.
        max_tokens: `max_tokens` of the request; None: until the context or `max_new_tokens` ends it.
        max_new_tokens: New tokens that it may have otherwise.
        context: Tokens of prompt and answer together; None: no limit.

    Raises:
        WouldForgetError: the prompt alone exceeds its budget, or `max_tokens` new tokens would evict
            from it; the message says how much.
        OptionError: the method's evictions do not follow from its budget, or prompt and answer exceed the context.
    """
    if max_tokens is not None and context is not None and n_tokens + max_tokens > context:
        raise OptionError(
            f"on_pressure='refuse': {n_tokens:,} tokens of prompt and {max_tokens:,} new ones are "
            f"{n_tokens + max_tokens:,}, and the model's context holds {context:,}; lower max_tokens, shorten the "
            f"prompt, {WAY_OUT}"
        )
    policy = cache_factory.policy
    if policy.keeps_all:
        return max_new_tokens
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
        return max_new_tokens
    free = min(max_new_tokens, held - n_tokens + 1)  # the last token of an answer is not stored
    if max_tokens is None:
        return min(max_new_tokens, free)
    if max_tokens > free:
        lost = min(max_tokens - free, n_tokens)
        raise WouldForgetError(
            f"on_pressure='refuse': the budget {cache_factory.budget} holds {held:,} entries per KV head, and "
            f"{n_tokens:,} tokens of prompt with {max_tokens:,} new ones could evict {lost:,} "
            f"({lost / n_tokens:.1%}) of the prompt; lower max_tokens to {free:,}, raise the budget, {WAY_OUT}"
        )
    return max_new_tokens


def _unforeseen(cache_factory: CacheFactory) -> str | None:
    """Return why it is unknown before a prompt is read how much of it stays, or None.

    It is known where the budget says it.
    """
    policy = cache_factory.policy
    if policy.heads_may_keep_all or policy.needs.head_rules is not None or isinstance(policy.heads, AboveThreshold):
        return f"under {cache_factory.described} entries leave by rules of their own, whatever the budget holds"
    return None


def _held(cache_factory: CacheFactory, layers: Sequence[LayerShape], n_tokens: int) -> int:
    """Return the fewest entries per KV head that a layer may hold after `n_tokens`.

    Layers with a window are left out; if all have one, these are all tokens.
    """
    entries = [
        cache_factory.entries(index, n_tokens, cache_factory.empty_table(layer))
        for index, layer in enumerate(layers)
        if not layer.window
    ]
    return min(entries, default=n_tokens)
