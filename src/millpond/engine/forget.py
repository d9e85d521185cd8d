"""Spans of a request's prompt that leave its cache as soon as they were read, or from the cache of an earlier turn."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.cache.batch_cache import BatchCache
from millpond.cache.state.spans import Span
from millpond.engine.request_state import RequestState
from millpond.errors import OptionError
from millpond.hf.forget import check_apart, forget_refusal, forgotten_spans
from millpond.runner.cache_factory import CacheFactory

#: Most spans of `Request.forget`.
MOST_FORGOTTEN = 1024


def checked_forgets(
    spans: Sequence[Span], recipe: CacheFactory, n_tokens: int, kept: Sequence[Span], chunks: bool
) -> tuple[Span, ...]:
    """Spans of a prompt of `n_tokens` that leave, ascending.

    Args:
        kept: spans that stay. chunks: whether the prompt holds chunks.

    Raises:
        OptionError: too many; no spans of the prompt before its last token; spans that overlap each other or what
            stays; or a method, model or prompt from whose cache no span can be taken (the message says why).
    """
    if not spans:
        return ()
    if len(spans) > MOST_FORGOTTEN:
        raise OptionError(f"forget has {len(spans)} spans: must be at most {MOST_FORGOTTEN}; join some of them")
    found = forgotten_spans(spans, n_tokens - 1, "the prompt without its last token, which the answer continues")
    check_apart(found, kept, "keep= keeps")
    reason = _refusal(recipe, chunks)
    if reason is not None:
        raise OptionError(f"forget: {reason}; or leave the text of the spans out of the prompt")
    return found


def _refusal(recipe: CacheFactory, chunks: bool) -> str | None:
    if recipe.slots is not None:
        return "this model's recurrent states hold the whole text, and a span cannot be taken out of them"
    if recipe.reach is not None:
        return "overflow='rolling' moves positions; leave one of the two out"
    if chunks:
        return "a prompt with chunks is not read in its order; give its text without Chunk"
    if (reason := forget_refusal(recipe.policy)) is not None:
        return reason
    if recipe.whole_prompt:
        return "this method reads a prompt in one pass, in which later tokens see the span; use another method"
    return None


def until_forgotten(live: RequestState, n: int) -> int:
    """Of `n` tokens that are to be read of a prompt, those up to the end of the next span that leaves."""
    read = live.job.read
    return next((min(n, end - read) for _, end in live.forget if end > read), n)


def drop_read(live: RequestState) -> None:
    """Let a span leave that was just read to its end.

    Raises:
        PoolFullError: see `BatchCache.drop_spans`.
    """
    ended = [span for span in live.forget if span[1] == live.job.read]
    if ended and live.stack is not None:
        live.stack.drop_spans(0, ended)
        note_dropped(live)


def drop_restored(stack: BatchCache, spans: Sequence[Span], forgotten: Sequence[Span], n_tokens: int) -> None:
    """Let spans leave the cache of an earlier turn of `n_tokens`, which had `forgotten` some of them already.

    Raises:
        PoolFullError: see `BatchCache.drop_spans`.
    """
    stack.timeline.dropped.add(forgotten, 0)
    known = set(forgotten)
    more = [(begin, min(end, n_tokens)) for begin, end in spans if begin < n_tokens]
    stack.drop_spans(0, [span for span in more if span not in known])


def note_dropped(live: RequestState) -> None:
    """Tell the answers of a request how many tokens of its prompt have left its cache so far."""
    if live.forget and live.stack is not None:
        dropped = live.stack.timeline.dropped.count(0)
        for answer in live.answers:
            answer.reuse = answer.reuse._replace(forgotten_tokens=dropped, exact=False)
