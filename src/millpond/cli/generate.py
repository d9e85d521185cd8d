"""`millpond generate`: a prompt in, streamed text out, and the size of the cache."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from millpond.cli.console import errors, forgotten_text, held_of, notes
from millpond.cli.options import (
    CacheChoice,
    Chat,
    DeviceMemory,
    Disk,
    EnginePlace,
    Memory,
    ModelOptions,
    NewTokens,
    OptionGroup,
    PluginFile,
    PromptSource,
    Temperature,
    TopP,
    TypicalP,
    Weights,
    encode,
    expand_groups,
    optional,
    wants_template,
)
from millpond.errors import OptionError

if TYPE_CHECKING:
    from millpond.engine.outputs import Forgotten
    from millpond.engine.sampling.params import SamplingParams
    from millpond.hf.stats import CacheStats
    from millpond.hf.stopwatch import Stopwatch


@dataclass(frozen=True, kw_only=True)
class Placing(OptionGroup):
    """Where the weights of a model lie, and in how many bits."""

    memory: Memory = None
    device_memory: DeviceMemory = None
    disk: Disk = None
    weights: Weights = None

    @property
    def asked(self) -> bool:
        """Whether the model runs on an engine."""
        return (self.memory or self.device_memory or self.disk or self.weights) is not None

    def check(self, device: str | None, chunk: int | None) -> None:
        """Check that the engine has the options that are given.

        Raises:
            OptionError: options of `generate` that the engine does not have.
        """
        names = ("memory", "device_memory", "disk", "weights")
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None)
        if device not in (None, "cpu") and (self.disk or self.weights) is not None:
            raise OptionError(f"--device {device}: --disk and --weights run on a CPU; leave --device out")
        if chunk is not None:
            raise OptionError(
                f"--chunk {chunk}: with {flags} prompts are read in steps of the engine; leave --chunk out"
            )


def generate_in_engine(
    model: ModelOptions,
    placing: Placing,
    text: str,
    chat: bool | None,
    settings: Mapping[str, Any],
    params: SamplingParams,
) -> None:
    """Write the answer to a text, and a line about it.

    Args:
        model: Options of the model.
        placing: Options of its place.
        text: The prompt.
        chat: As `--chat`.
        settings: Fields of `EngineConfig`.
        params: Sampling parameters of the answer; the end of a turn is added where the chat template is used.
    """
    from millpond.cli.chat_backend import LocalBackend
    from millpond.engine.config import EngineConfig
    from millpond.engine.llm import LLM

    config = EngineConfig(**settings, weights=placing.weights, trust_remote_code=model.trust_remote_code)
    limits: dict[str, Any] = {"memory": placing.memory, "disk": placing.disk, "device_memory": placing.device_memory}
    place = EnginePlace(**limits, dtype=model.dtype, device=model.device).as_arguments(placing.weights)
    with notes(), LLM(model.model, config, **place) as llm:
        partner = LocalBackend(llm, params, model.model)
        ids = encode(llm.tokenizer, text, chat)[0].tolist()
        for part in partner.stream(tuple(ids), turn=wants_template(llm.tokenizer, chat)):
            sys.stdout.write(part)
            sys.stdout.flush()
        sys.stdout.write("\n")
        line = partner.last()
    errors().print(f"[dim]{escape(line)}[/]", soft_wrap=True, highlight=False)


@dataclass(frozen=True, kw_only=True)
class Sampling(OptionGroup):
    """How the next token is chosen; temperature 0 takes the most likely one."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 disables it.")] = 0
    typical_p: TypicalP = 1.0
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise OptionError(f"temperature={self.temperature} must not be negative; 0 is greedy")
        for name in ("top_p", "typical_p"):
            if not 0 < getattr(self, name) <= 1:
                raise OptionError(f"{name}={getattr(self, name)} must lie in (0, 1]; 1 turns it off")
        if self.top_k < 0:
            raise OptionError(f"top_k={self.top_k} must not be negative; 0 turns it off")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k or self.typical_p < 1):
            raise OptionError(
                "top_p, top_k and typical_p have no effect at temperature 0; set --temperature, for example 0.7"
            )

    def drawn(self) -> dict[str, Any]:
        """Return fields of `SamplingParams`."""
        return {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "typical_p", "seed")}

    def kwargs(self) -> dict[str, Any]:
        """Return arguments of `generate()`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "typical_p": self.typical_p,
        }


@expand_groups
def generate(
    *,
    source: PromptSource,
    model: ModelOptions,
    cache: CacheChoice,
    plugin: PluginFile = None,
    max_new_tokens: NewTokens = 128,
    sampling: Sampling,
    min_new_tokens: Annotated[int, typer.Option(min=0, help="New tokens, at least.")] = 0,
    bad_word: Annotated[
        list[str] | None, optional(help="Never generated, with or without a space before it; may be repeated.")
    ] = None,
    memory_limit: Annotated[
        str | None, optional(help="Limit of the memory for pages ('2GiB'); beyond it generation stops.")
    ] = None,
    page_slots: Annotated[int | None, optional(help="Entries per page, a power of two. Default: measured.")] = None,
    chunk: Annotated[
        int | None, optional(min=1, help="Read the prompt in chunks of N tokens, and evict after each (lowest peak).")
    ] = None,
    chat: Chat = None,
    placing: Placing,
) -> None:
    """Generate text from a prompt inside a KV budget."""
    if min_new_tokens > max_new_tokens:
        raise OptionError(f"--min-new-tokens {min_new_tokens} is more than --max-new-tokens {max_new_tokens}; lower it")
    from millpond.engine.sampling.params import SamplingParams
    from millpond.plugin_file import load_plugin

    load_plugin(plugin)
    words = SamplingParams(bad_words=tuple(bad_word or ())).bad_words
    text = source.read()
    if placing.asked:
        placing.check(model.device, chunk)
        settings = {"kv_memory": memory_limit, "calibration": cache.calibration, **cache.for_request()}
        settings |= {} if page_slots is None else {"page_slots": page_slots}
        params = SamplingParams(
            max_tokens=max_new_tokens, min_tokens=min_new_tokens, bad_words=words, **sampling.drawn()
        )
        generate_in_engine(model, placing, text, chat, settings, params)
        return
    cache_options = cache.for_compress()
    import torch

    from millpond.cache.pages.pool import DEFAULT_SLOTS
    from millpond.cli.text_streamer import TextStopwatch
    from millpond.engine.forget import forgotten
    from millpond.engine.sampling.banned_tokens import sequences_of
    from millpond.hf.compress import compress
    from millpond.models.cache_argument import cache_argument
    from millpond.models.chat_template import end_ids

    loaded, tokenizer = model.load()
    ids = encode(tokenizer, text, chat).to(loaded.device)
    torch.manual_seed(sampling.seed)
    extra: dict[str, Any] = {"prefill_chunk_size": chunk} if chunk else {}
    if wants_template(tokenizer, chat) and (ends := end_ids(loaded, tokenizer)) is not None:
        extra["eos_token_id"] = ends
    if bad := sequences_of(words, tokenizer):
        extra["bad_words_ids"] = [list(ids) for ids in bad]
    if min_new_tokens:
        extra["min_new_tokens"] = min_new_tokens
    with (
        notes(),
        compress(
            loaded,
            memory_limit=memory_limit,
            page_slots=page_slots or DEFAULT_SLOTS,
            tokenizer=tokenizer,
            **cache_options,
        ) as held,
    ):
        watch = TextStopwatch(tokenizer)
        loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **cache_argument(held),
            streamer=watch,
            max_new_tokens=max_new_tokens,
            **sampling.kwargs(),
            **extra,
        )
        stats = held.stats()
        (lost,) = forgotten(held.layer_caches, held.tracker, 0, [(0, ids.shape[1])])
    errors().print(f"[dim]{escape(closing_line(ids.shape[1], watch, stats, lost))}[/]", soft_wrap=True, highlight=False)


def closing_line(n_prompt: int, watch: Stopwatch, stats: CacheStats, lost: Forgotten) -> str:
    """Return a line about the run: its speed, the cache's bytes, and what it has forgotten."""
    prefill = n_prompt / watch.prefill_s if watch.prefill_s else 0.0
    return (
        f"prompt {n_prompt:,} tokens at {prefill:,.0f} tokens/s · {len(watch.ticks):,} new at "
        f"{watch.tokens_per_s:,.1f} tokens/s · {held_of(stats.kv_bytes, stats.unused_bytes, stats.full_kv_bytes)} · "
        f"{forgotten_text(lost)}"
    )
