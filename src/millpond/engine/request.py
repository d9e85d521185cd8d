"""Request: a prompt, its sampling parameters, and options of its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millpond.budget import Budget
from millpond.engine.sampling.params import SamplingParams
from millpond.option_files import OptionFile

#: Characters of a salt.
MOST_SALT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How one request's cache is kept; None where the engine's default holds.

    Attributes:
        method, options: a method's name and options, as `compress` takes them. budget: "20%", 512, "64MiB", a Budget.
        codec: the name of a number format, or a pair for keys and values.
        files: what options may name as files, by name; None: any file, by its path.
    """

    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | str | int | float | None = None
    codec: str | tuple[str, str] | None = None
    files: Mapping[str, OptionFile] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question to the engine.

    Attributes:
        request_id: a name that no other request in flight has.
        prompt: a text, or token ids.
        client: who asks. Of those with one priority the client goes first that has had less service, in tokens read and
            written; of one client's requests the one that came first.
        cache_salt: requests with the same one share prompts that begin alike, with `prefix_cache`, and with no others;
            None: with all that have none. At most `MOST_SALT` characters. Only its keyed hash is kept.
        priority: lower goes first, whoever asks.
        deadline: seconds after arrival at which the request ends with what it has; None: never.
        watch: keep what the cache held at the end, for `AsyncLLM.memory`.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache: CacheOptions = field(default_factory=CacheOptions)
    client: str = ""
    cache_salt: str | None = field(default=None, repr=False)
    priority: int = 0
    deadline: float | None = None
    watch: bool = False
