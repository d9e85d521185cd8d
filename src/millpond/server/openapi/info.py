"""Answers of /infill, and of the routes about the server, its tokenizer, its memory and its workers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from millpond.server.openapi.answers import ChoiceFigures, Described


class ModelCache(Described):
    """How a model's caches are kept by default, and what a request can choose instead."""

    context_length: int
    methods: list[str]
    without_budget: list[str]
    presets: dict[str, dict[str, Any]]
    method: str | None
    options: dict[str, Any]
    budget: str | None
    codec: str | list[str] | None
    kv_limit_bytes: int | None
    tokenizer: bool
    chat_template: str | None


class ServedModel(Described):
    """The model, with the fields of OpenAI and of Anthropic."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    created: int
    created_at: str
    owned_by: Literal["millpond"]
    millpond: ModelCache


class ServedModels(Described):
    """The model that is served, as the only one of a list."""

    object: Literal["list"]
    data: list[ServedModel]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Health(Described):
    """Whether new requests are accepted, and the reason if the engine does not answer; with several workers also how
    many accept requests, by role."""

    status: Literal["ok", "shutting down", "stalled"]
    reason: str | None = None
    roles: dict[str, int] | None = None


class Version(Described):
    """The version of Millpond."""

    version: str


class Tokenized(Described):
    """The token ids of a text."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(Described):
    """The text of token ids."""

    prompt: str


class Session(Described):
    """A finished turn whose cache is stored."""

    id: str
    object: Literal["millpond.session"]
    tokens: int
    bytes: int
    last_used: float


class Sessions(Described):
    """The stored turns of a client, the last used first."""

    object: Literal["list"]
    data: list[Session]


class SessionsDeleted(Described):
    """How many stored turns were removed."""

    object: Literal["millpond.sessions.deleted"]
    deleted: int


class MemoryOfLayer(Described):
    """For each token its text (from `since` on), the share of heads that keep it, and its mean score; and totals."""

    layer: int
    n_layers: int
    n_kv_heads: int
    since: int
    texts: list[str]
    kept: list[float]
    scores: list[float | None]
    seen: int
    held: float
    kv_bytes: int
    unused_bytes: int
    full_kv_bytes: int
    evicted: int


class ClusterWorker(Described):
    """A worker; the figures of its engine are missing while it starts."""

    name: str
    role: str
    pid: int
    node: str
    state: str
    requests: int
    handoff_bytes: int
    running: int | None = None
    waiting: int | None = None
    swapped: int | None = None
    kv_bytes: int | None = None
    kv_reserved: int | None = None
    kv_limit: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None


class ClusterWorkers(Described):
    """All workers, and what was moved, copied, replayed and lost so far."""

    workers: list[ClusterWorker]
    moved: int
    moved_bytes: int
    full_bytes: int
    replayed: int
    deaths: int
    move_s: float
    checkpoints: int
    checkpoint_bytes: int
    resumed: int
    role_changes: int


class WorkerDrained(Described):
    """A worker that has ended, and how many of its requests moved or were replayed."""

    worker: str
    moved: int
    replayed: int
    seconds: float


class InfillTimings(Described):
    """Tokens, milliseconds and speed of the prompt that was read, and of the answer."""

    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Infilled(Described):
    """A text in the middle, or the end of its stream; with `response_fields` only these, each under its path."""

    model_config = ConfigDict(
        json_schema_extra={"required": [], "additionalProperties": True}  # which fields come is the client's choice
    )

    index: Literal[0]
    content: str
    id_slot: Literal[-1]
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: Literal[False]
    has_new_line: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    timings: InfillTimings
    millpond: ChoiceFigures


class InfillChunk(Described):
    """The next piece of the text."""

    model_config = ConfigDict(json_schema_extra={"required": [], "additionalProperties": True})

    index: Literal[0]
    content: str
    id_slot: Literal[-1]
    stop: Literal[False] = Field(description="More comes.")
