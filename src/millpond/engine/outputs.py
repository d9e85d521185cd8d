"""Outputs of the engine: a request's text so far, its cache, its times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from millpond.cache.chunks.store import ChunkStoreStats
from millpond.engine.sessions.folder import SessionStats
from millpond.errors import MillpondError

#: Why a completion ended: a stop text, a stop token or the model's own end; its length (max_tokens or the model's
#: context); cancellation; its deadline; or an error, which is in the output.
FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log probability, and those of the likeliest tokens in its place.

    Attributes:
        token_id: id of the token.
        logprob: natural logarithm of its probability.
        text: of the token alone, with the blank before it; a replacement character for a part of a character.
        top: (token id, log probability, text), the likeliest first.
        spelled: the token's own bytes; those of the tokens of a text, one after the other, are the text in UTF-8, but
            for special tokens and a blank at its beginning.
        top_spelled: those of the tokens of `top`.
    """

    token_id: int
    logprob: float
    text: str
    top: tuple[tuple[int, float, str], ...] = ()
    spelled: bytes = b""
    top_spelled: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class KVStats:
    """Size of a request's cache.

    Attributes:
        seen: tokens processed.
        held: entries per KV head, on average over layers and heads.
        kv_bytes: bytes of keys and values in its pages.
        full_kv_bytes: bytes of all its tokens in the model's dtype and without pages.
        evicted: entries evicted, over all layers and heads.
        unused_bytes: bytes of `kv_bytes` in slots without an entry.
        shared_tokens: tokens of the prompt that were taken from shared pages.
        state_bytes: bytes of its recurrent and convolution states, in a hybrid, which no other count includes.
        restored_tokens: tokens of the prompt that the stored cache of an earlier turn had read.
        reused_tokens: tokens of the prompt that came from a chunk store. recomputed_tokens: tokens of its reused chunks
            that were computed again.
        forgotten_tokens: tokens of the prompt that left by `PromptMarks.forget`.
        exact: all of them are as the whole prompt would give them, up to rounding: not behind a compressed turn.
    """

    seen: int
    held: float
    kv_bytes: int
    full_kv_bytes: int
    evicted: int
    unused_bytes: int = 0
    shared_tokens: int = 0
    state_bytes: int = 0
    restored_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    forgotten_tokens: int = 0
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a cache has lost of a span of the prompt, when an answer ended.

    Attributes:
        begin, end: the span, in tokens of the prompt, `end` not included.
        share: of its tokens that no head of any layer holds.
        fewer_than_half: share that fewer than half of all heads hold, those of `share` included.
        held: of the entries that it had, one for each token, layer and KV head, the share that is held.
    """

    begin: int
    end: int
    share: float
    fewer_than_half: float
    held: float


@dataclass(frozen=True, slots=True)
class Times:
    """Moments on `time.monotonic()`'s clock, in seconds; None: not yet."""

    arrived: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer so far.

    Attributes:
        index: 0 to n - 1.
        text: the whole text so far.
        token_ids: all tokens so far, the one that ended the answer included.
        logprobs: one per token id, if requested.
        finish_reason: None while the answer grows.
        stop_reason: the stop text or token id that ended it; None for the model's own end.
        kv: size of its cache, now or when it ended.
        forgotten: one for each span of `PromptMarks.report`, once it ended; none if its prompt was not read
            then, or its cache was swapped out.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    kv: KVStats | None = None
    forgotten: tuple[Forgotten, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its answers so far.

    Attributes:
        request_id: name of the request.
        prompt: its text; None where only ids were given.
        prompt_token_ids: its tokens.
        completions: its answers.
        times: of the request.
        prompt_logprobs: one per token of the prompt, None for the first, if requested.
        finished: all completions ended.
        error: cause of an early end.
        read: tokens of the prompt that are in its cache. cached: of these, those that were taken from shared pages, a
            stored turn or a chunk store.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    times: Times
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finished: bool = field(default=False)
    error: MillpondError | None = None
    read: int = 0
    cached: int = 0

    @property
    def outputs(self) -> tuple[Completion, ...]:
        """The answers, as `completions`: the name that vLLM has for them."""
        return self.completions


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Entries that one layer holds of a request's first answer at one moment.

    Attributes:
        layer: index of the layer among those with attention, as all layers are in models that are no hybrids.
        n_layers: how many these are.
        n_kv_heads: KV heads of the layer.
        token_ids: tokens of prompt and answer that were processed.
        kept: per token the share of the KV heads that hold it, 0 to 1.
        scores: per token the mean score over the heads that hold it; None where none does.
        kv: size of the whole cache.
    """

    layer: int
    n_layers: int
    n_kv_heads: int
    token_ids: tuple[int, ...]
    kept: tuple[float, ...]
    scores: tuple[float | None, ...]
    kv: KVStats


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """The prefix cache at one moment; counters count from the engine's start, in blocks of `page_slots` tokens.

    Attributes:
        rule: name of the paging rule.
        blocks: blocks held.
        hits: counter of blocks of prompts that were taken from it.
        misses: counter of other full blocks of the prompts that share.
        evicted: counter of blocks that the rule chose, because their memory was needed.
        sums_bytes: bytes of the sums that are kept at breakpoints.
        disk_blocks, disk_bytes: blocks on the disk and their bytes; 0 without `prefix_disk`.
        returned: counter of blocks that came back from the disk. lost: of those that could not be read there.
    """

    rule: str
    blocks: int
    hits: int
    misses: int
    evicted: int
    sums_bytes: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0
    returned: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment; counters count from its start.

    Attributes:
        running: requests that read their prompt or decode.
        waiting: requests that have not begun, shared prefixes of batches that have not begun among them.
        swapped: requests that were preempted.
        kv_bytes: bytes of keys, values and their metadata in pages in use.
        kv_reserved: bytes of all pages, free ones included, and of states.
        kv_limit: limit of `kv_reserved`; None for none.
        kv_saved: bytes that full caches of the running requests would hold beyond `kv_bytes`.
        prompt_tokens: counter of tokens read.
        generated_tokens: counter of tokens written.
        evicted_entries: counter of entries evicted.
        shared_tokens: counter of tokens taken from shared pages.
        preemptions: counter of requests swapped out.
        finished: counter of requests that ended.
        state_bytes: bytes of recurrent and convolution states, in a hybrid.
        weight_bytes: bytes of the model's weights in memory, with the slots of those that come and go.
        reused_tokens: counter of tokens taken from a chunk store. chunks: the store; None: there is none.
        prefix: the prefix cache; None without one.
        restored_tokens: counter of tokens of prompts that stored turns had read. sessions: these; None: none.
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
    state_bytes: int = 0
    weight_bytes: int = 0
    reused_tokens: int = 0
    chunks: ChunkStoreStats | None = None
    prefix: PrefixStats | None = None
    restored_tokens: int = 0
    sessions: SessionStats | None = None
