"""A request: its prompt, sampling parameters and cache options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millpond.budget import Budget
from millpond.codec import CodecSpec
from millpond.engine.chunks.prompt import Prompt
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.settings import OnPressure as OnPressure
from millpond.images.picture import Picture
from millpond.option_files import OptionFile
from millpond.policy.reuse import Pick, Recompute
from millpond.prompt_marks import PromptMarks

#: Limit of characters of a salt.
MAX_SALT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options of one request's cache; None where the engine's default holds.

    Attributes:
        method: Name of a method, as `compress` takes it.
        options: Options of the method.
        budget: "20%", 512, "64MiB", or a Budget; "auto", budget and codec with the fewest bytes that keep `max_kl`.
        codec: Name of a number format, a pair for keys and values, tiers by age, or names by layer.
        files: Files that options may name, by name; None: any file, by its path.
        recompute: Share of each chunk from the store that is computed again, in a prompt with chunks: "auto", as
            its context needs (CFO); or a number from 0, all is reused, to 1, the exact prompt.
        max_kl: With budget="auto", see `compress`; the table is the engine's.
        pick: Choice of these tokens: "attention", "head", "deviation" or "random", see `millpond.policy.reuse.Pick`.
        preset: Method, budget and codec in one word, in place of the three: see `millpond.preset`.
        on_pressure: "refuse" the request, before it is read, where anything of its prompt would be evicted before its
            answers end, or "evict" as its method does; None: as the engine does.
    """

    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | str | int | float | None = None
    codec: CodecSpec | None = None
    files: Mapping[str, OptionFile] | None = None
    recompute: Recompute = "auto"
    max_kl: float | None = None
    pick: Pick = "attention"
    preset: str | None = None
    on_pressure: OnPressure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt for the engine.

    Attributes:
        request_id: A name that no other request in flight has.
        prompt: A text, token ids, or a `Prompt` of texts and chunks.
        params: Token choice and stopping.
        cache: Options of its cache.
        client: Name of the sender. Among requests of one priority the client with less service, in tokens read and
            written, goes first; requests of one client keep their order.
        cache_salt: With `prefix_cache`, requests share prefixes only with requests of the same salt; None: with all
            that have none. At most `MAX_SALT` characters. Only its keyed hash is kept.
        priority: Lower goes first, before clients are compared.
        deadline: Seconds after arrival at which the request ends with what it has; None: never.
        watch: Keep a snapshot of the cache at the end, for `AsyncLLM.memory`.
        known: Tokens of each of the `n` answers that are known already, such as those that a lost engine has sent to a
            client: they are fed after the prompt and its plan, and further tokens are chosen. Empty: none.
        tell_read: Give outputs while the prompt is read, too, with how far it is (`RequestOutput.read`).
        marks: Spans of the prompt with a treatment of their own, and its breakpoints.
        images: Pictures of the prompt in their order, for a model that takes images; the prompt has
            `ImageReader.n_tokens` image tokens in the place of each.
    """

    request_id: str
    prompt: str | tuple[int, ...] | Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    cache: CacheOptions = field(default_factory=CacheOptions)
    client: str = ""
    cache_salt: str | None = field(default=None, repr=False)
    priority: int = 0
    deadline: float | None = None
    watch: bool = False
    known: tuple[tuple[int, ...], ...] = ()
    tell_read: bool = False
    marks: PromptMarks = field(default_factory=PromptMarks)
    images: tuple[Picture, ...] = ()
