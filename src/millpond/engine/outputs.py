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
        token_id: Id of the token.
        logprob: Natural logarithm of its probability.
        text: Text of the token alone, with the blank before it; a replacement character for a part of a character.
        top: (token id, log probability, text), the likeliest first.
        spelled: Bytes of the token; joined, those of the tokens of a text are the text in UTF-8, except
            for special tokens and a blank at its beginning.
        top_spelled: Bytes of the tokens of `top`.
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
        seen: Tokens processed.
        held: Entries per KV head, on average over layers and heads.
        kv_bytes: Bytes of keys and values in its pages.
        full_kv_bytes: Bytes of all its tokens in the model's dtype and without pages.
        evicted: Entries evicted, over all layers and heads.
        unused_bytes: Bytes of `kv_bytes` in slots without an entry.
        shared_tokens: Tokens of the prompt that were taken from shared pages.
        state_bytes: Bytes of its recurrent and convolution states, in a hybrid, which no other count includes.
        restored_tokens: Tokens of the prompt that the stored cache of an earlier turn had read.
        reused_tokens: Tokens of the prompt that came from a chunk store.
        recomputed_tokens: Tokens of its reused chunks that were computed again.
        forgotten_tokens: Tokens of the prompt that left by `PromptMarks.forget`.
        decoded_tokens: Tokens of the prompt that came from codes of a storage codec.
        exact: Whether all of them are as the whole prompt would give them, up to rounding: not after a compressed turn,
            nor from codes.
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
    decoded_tokens: int = 0
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Loss of a span of the prompt from a cache, when an answer ended.

    Attributes:
        begin: First token of the span in the prompt.
        end: Token after its last one.
        share: Share of its tokens that no head of any layer holds.
        fewer_than_half: Share that fewer than half of all heads hold, those of `share` included.
        held: Share that is held of its entries, one for each token, layer and KV head.
    """

    begin: int
    end: int
    share: float
    fewer_than_half: float
    held: float


@dataclass(frozen=True, slots=True)
class Times:
    """Moments on `time.monotonic()`'s clock, in seconds; None: not yet.

    Attributes:
        arrived: When the request was added.
        started: When its prompt began to be read.
        first_token: When its first token was chosen.
        finished: When its last answer ended.
    """

    arrived: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer so far.

    Attributes:
        index: 0 to n - 1.
        text: The whole text so far.
        token_ids: All tokens so far, the one that ended the answer included.
        logprobs: One per token id, if requested.
        finish_reason: None while the answer grows.
        stop_reason: The stop text or token id that ended it; None for the model's own end.
        kv: Size of its cache, now or when it ended.
        forgotten: One for each span of `PromptMarks.report`, once it ended; none if its prompt was not read
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
        request_id: Name of the request.
        prompt: Its text; None where only ids were given.
        prompt_token_ids: Its tokens.
        completions: Its answers.
        times: Its moments so far.
        prompt_logprobs: One per token of the prompt, None for the first, if requested.
        finished: Whether all completions ended.
        error: Cause of an early end.
        read: Tokens of the prompt that are in its cache.
        cached: Tokens of these that were taken from shared pages, a stored turn or a chunk store.
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
        """Answers, as `completions`: vLLM's name for them."""
        return self.completions


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Entries that one layer holds of a request's first answer at one moment.

    Attributes:
        layer: Index of the layer among those with attention, as all layers are in models that are no hybrids.
        n_layers: Number of these layers.
        n_kv_heads: KV heads of the layer.
        token_ids: Tokens of prompt and answer that were processed.
        kept: Per token the share of the KV heads that hold it, 0 to 1.
        scores: Per token the mean score over the heads that hold it; None where none does.
        kv: Size of the whole cache.
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
    """The prefix cache at one moment; counters count from the engine's start.

    Blocks have `page_slots` tokens.

    Attributes:
        rule: Name of the paging rule.
        blocks: Blocks held.
        hits: Counter of blocks of prompts that were taken from it.
        misses: Counter of other full blocks of the prompts that share.
        evicted: Counter of blocks that the rule chose, because their memory was needed.
        sums_bytes: Bytes of the sums that are kept at breakpoints.
        disk_blocks: Blocks on the disk; 0 without `prefix_disk`.
        disk_bytes: Their bytes.
        returned: Counter of blocks that were read back from the disk.
        lost: Counter of blocks that could not be read there, or whose codes were damaged.
        coded_blocks: Blocks in memory with codes of the storage codec, with pages or without.
        coded_bytes: Bytes of these codes.
        waiting_blocks: Blocks that wait to be coded.
        live_blocks: Blocks with pages, where there is a storage codec.
        live_bytes: Bytes of these pages.
        encoded: Counter of blocks that were coded.
        decoded: Counter of blocks that were decoded.
        encode_s: Counter of CPU seconds of coding.
        decode_s: Counter of CPU seconds of decoding.
        decoded_tokens: Counter of tokens of prompts that came from codes.
        storage_codec: Name of the storage codec of its blocks; "" where they are not coded.
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
    coded_blocks: int = 0
    coded_bytes: int = 0
    waiting_blocks: int = 0
    live_blocks: int = 0
    live_bytes: int = 0
    encoded: int = 0
    decoded: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    decoded_tokens: int = 0
    storage_codec: str = ""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment; counters count from its start.

    Attributes:
        running: Requests that read their prompt or decode.
        waiting: Requests that have not begun, shared prefixes of batches that have not begun among them.
        swapped: Requests that were preempted.
        kv_bytes: Bytes of keys, values and their metadata in pages in use.
        kv_reserved: Bytes of all pages, free ones included, and of states.
        kv_limit: Limit of `kv_reserved`; None for none.
        kv_saved: Bytes that full caches of the running requests would hold beyond `kv_bytes`.
        prompt_tokens: Counter of tokens read.
        generated_tokens: Counter of tokens written.
        evicted_entries: Counter of entries evicted.
        shared_tokens: Counter of tokens taken from shared pages.
        preemptions: Counter of requests swapped out.
        finished: Counter of requests that ended.
        state_bytes: Bytes of recurrent and convolution states, in a hybrid.
        weight_bytes: Bytes of the model's weights in memory, with the slots of streamed ones.
        reused_tokens: Counter of tokens taken from a chunk store.
        chunks: Figures of the chunk store; None: there is none.
        prefix: Figures of the prefix cache; None without one.
        restored_tokens: Counter of tokens of prompts that stored turns had read.
        sessions: Figures of the stored turns; None: none are stored.
        swapped_bytes: Bytes on the host of the caches of preempted requests.
        encode_s: Counter of seconds in which sequences of requests were coded: of turns, preempted and sent requests.
        decode_s: Counter of seconds in which they were decoded.
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
    swapped_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
