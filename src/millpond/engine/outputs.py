"""Outputs of the engine: a request's text so far, its cache, its times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from millpond.errors import MillpondError

#: Why a completion ended: by a stop text, a stop token or the model's own end; by its length (max_tokens or the model's
#: context); because somebody cancelled it; because its deadline came; because of an error, which the output tells.
FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log probability, and those of the likeliest tokens in its place.

    Attributes:
        text: of the token alone. top: (token id, log probability, text), the likeliest first.
    """

    token_id: int
    logprob: float
    text: str
    top: tuple[tuple[int, float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class KVStats:
    """What a request's cache holds.

    Attributes:
        seen: tokens processed. held: entries per KV head, on average over layers and heads.
        kv_bytes: bytes of keys and values in its pages. unused_bytes: of these, in slots that hold no entry.
        full_kv_bytes: what all its tokens would take in the model's dtype and without pages.
        evicted: entries that left, over all layers and heads. shared_tokens: of the prompt, read from shared pages.
    """

    seen: int
    held: float
    kv_bytes: int
    full_kv_bytes: int
    evicted: int
    unused_bytes: int = 0
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """Moments on `time.monotonic()`'s clock, in seconds; None: not yet."""

    arrived: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer, as far as it has come.

    Attributes:
        index: 0 to n - 1. text: all of it. token_ids: all of them, the one that ended it included.
        logprobs: one per token id, if asked for. finish_reason: None while it goes on.
        stop_reason: the stop text or token id that ended it; None for the model's own end.
        kv: of its cache, while it runs and as it was when it ended.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    kv: KVStats | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its answers, as far as they have come.

    Attributes:
        prompt: None where only ids were given. prompt_logprobs: one per token, None for the first, if asked for.
        finished: all completions ended. error: what ended them too early.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    times: Times
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finished: bool = field(default=False)
    error: MillpondError | None = None


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """What one layer remembers of a request's first answer at one moment.

    Attributes:
        layer: it, of n_layers. n_kv_heads: its KV heads.
        token_ids: of prompt and answer, as far as they were processed.
        kept: per token the share of the KV heads that hold it, 0 to 1.
        scores: per token the mean score over the heads that hold it; None where none does.
        kv: of the whole cache.
    """

    layer: int
    n_layers: int
    n_kv_heads: int
    token_ids: tuple[int, ...]
    kept: tuple[float, ...]
    scores: tuple[float | None, ...]
    kv: KVStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment; counters count from its start.

    Attributes:
        running, waiting, swapped: requests. kv_bytes: of keys, values and what travels with them, in pages in use.
        kv_reserved: bytes of all pages, free ones included. kv_limit: what they may never exceed.
        kv_saved: bytes that full caches of the running requests would hold beyond kv_bytes.
        prompt_tokens, generated_tokens, evicted_entries, shared_tokens, preemptions, finished: counters.
    """

    running: int
    waiting: int
    swapped: int
    kv_bytes: int
    kv_reserved: int
    kv_limit: int | None
    kv_saved: int
    prompt_tokens: int
    generated_tokens: int
    evicted_entries: int
    shared_tokens: int
    preemptions: int
    finished: int
