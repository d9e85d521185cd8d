"""LLM: a model with an engine, for scripts: prompts in, answers out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import torch

from millpond.engine.batch_plan import BatchPlan
from millpond.engine.chunks.prompt import Chunk, Prompt
from millpond.engine.chunks.tune import AlphaFit, tune_alpha
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.open import Placement, folder_of
from millpond.engine.offload.options import LoadOptions
from millpond.engine.options import LLMOptions
from millpond.engine.outputs import EngineStats, RequestOutput
from millpond.engine.prompts import IDS, IMAGES, Prompts, requests_of
from millpond.engine.request import CacheOptions
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.sessions.store import SessionStore
from millpond.errors import OptionError, unknown
from millpond.models.chat_template import Message, chat_prompt
from millpond.models.device import check_dtype_there, check_room_for
from millpond.models.dtype_name import dtype_name
from millpond.models.load import find_image_processor, find_tokenizer, load_model, resolve
from millpond.models.weights.layout import has_safetensors
from millpond.optional import require
from millpond.prompt_marks import PromptMarks
from millpond.setting import shows_options, split_options

#: Order of the requests of one call, see `LLM.generate`.
Schedule = Literal["arrival", "batch"]


class LLM:
    """A model that answers many prompts at once inside one memory limit.

    Args:
        model: A name or folder, or a loaded transformers decoder.
        config: Settings of the engine; None for the defaults.
        **options: Fields of `EngineConfig`, in place of those of `config`, and of `LoadOptions`: see
            docs/reference/settings.md.

    Raises:
        OptionError, BudgetError, UnsupportedModelError: as `compress`; or a model that cannot be loaded, or not in
            that memory.
        DataError: a damaged file of weights.

    Attributes:
        engine: Engine that runs the requests.
        plan: Placement of weights and KV in memory and on disk; None without `memory`, `plan` and `weights`.

    Example:
        >>> with LLM("pond-recall", method="snapkv", budget=64) as llm:
        ...     llm.engine.config.budget
        64
    """

    @shows_options(LoadOptions, EngineConfig)
    def __init__(self, model: Any, config: EngineConfig | None = None, **options: Unpack[LLMOptions]) -> None:
        loading, settings = split_options("LLM", options, LoadOptions, EngineConfig)
        self.engine, self.plan = open_engine(model, EngineConfig.of(config, settings), LoadOptions(**loading))
        self._names = count()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheOptions | None = None,
        marks: PromptMarks | Sequence[PromptMarks] | None = None,
        schedule: Schedule = "arrival",
        progress: bool = False,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts.

        Args:
            prompts: One or several, texts, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}` or `Prompt`s. A
                mapping may have `images`, a list of data: URLs, bytes of files or images of Pillow: its text has the
                image token once for each, ids have it `ImageReader.n_tokens` times.
            params: Token choice and stopping, for all of them, or one for each.
            cache: Method, budget and codec of these requests; None: those of the LLM.
            marks: Spans of each prompt that are kept, shared out, forgotten or reported on, and its breakpoints: one
                `PromptMarks` for all, or one for each.
            schedule: "arrival" begins them in their order; "batch" reads what several begin with once, in the order
                that `plan_batch` shows. The tokens are the same.
            progress: Show a bar (needs rich).
            sampling_params: `params` under vLLM's name.

        Returns:
            One output per prompt, in their order.

        Raises:
            OptionError, BudgetError, UnsupportedModelError: a prompt is refused; nothing was generated.
        """
        outputs = self.stream(
            prompts,
            params,
            cache=cache,
            marks=marks,
            schedule=schedule,
            progress=progress,
            sampling_params=sampling_params,
        )
        return sorted(outputs, key=lambda out: int(out.request_id))

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheOptions | None = None,
        marks: PromptMarks | Sequence[PromptMarks] | None = None,
        schedule: Schedule = "arrival",
        progress: bool = False,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer all prompts as `generate` does, and yield each output as soon as it is finished."""
        if schedule not in get_args(Schedule):
            raise unknown("schedule", schedule, get_args(Schedule))
        if sampling_params is not None:
            if params is not None:
                raise OptionError("params= and sampling_params= are two names of one argument; give one of them")
            params = sampling_params
        requests = requests_of(prompts, params, cache, self._names, marks, self.engine.images)
        for request in requests:
            self.engine.require_breakpoints(request)
        try:
            if schedule == "batch":
                self.engine.add_batch(requests)
            else:
                for request in requests:
                    self.engine.add(request)
            outputs = self._outputs()
            yield from _with_progress(outputs, len(requests)) if progress else outputs
        finally:
            for request in requests:
                self.engine.cancel(request.request_id)
            self.engine.drain()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **generate: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, written by the model's chat template.

        Args:
            messages: `{"role": ..., "content": ...}` each; the answer follows the last one. Or several conversations.
                A content is a text, or a list of parts: `{"type": "text", "text": ...}` or
                `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`.
            sampling_params: Token choice and stopping of the answers; see `generate`.
            tools: Tools that the template shows to the model.
            chat_template: Another template than the tokenizer's.
            chat_template_kwargs: Further arguments of the template.
            **generate: Arguments of `generate`.

        Raises:
            OptionError: the model has no template, or one that leaves tools or calls out; or something is no
                message. Also as `generate`.
            ImageError: an image that is refused, see `ImageReader.read`.
        """
        conversations: list[Any] = list(messages)
        are_several = bool(conversations) and not isinstance(conversations[0], Mapping)
        template_options = {"tools": None if tools is None else list(tools), **(chat_template_kwargs or {})}
        chats = [
            chat_prompt(self.tokenizer, conversation, chat_template, template_options, self.engine.images)
            for conversation in (conversations if are_several else [conversations])
        ]
        return self.generate([{IDS: ids, IMAGES: images} for ids, images in chats], sampling_params, **generate)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer: vLLM's name of `tokenizer`."""
        return self.tokenizer

    def plan_batch(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheOptions | None = None,
        levels: int | None = None,
    ) -> BatchPlan:
        """Return the beginnings that `generate(..., schedule="batch")` reads once, in their order.

        Nothing runs.

        Args:
            prompts: As in `generate`.
            params: As in `generate`.
            cache: As in `generate`.
            levels: Levels of common beginnings; None as in `generate`; 1: that of BatchLLM, to compare with.

        Returns:
            The plan; it also says how many tokens it spares.

        Raises:
            OptionError, BudgetError, UnsupportedModelError: as `generate`.
        """
        requests = requests_of(prompts, params, cache, self._names, reader=self.engine.images)
        return self.engine.plan_batch(requests, levels)

    def store_chunks(self, texts: Sequence[str], *, alone: bool = False) -> None:
        """Compute chunks for the chunk store, each after the one before it; stored ones stay.

        After some text, whatever it says, a chunk can be used much better elsewhere than alone: see
        docs/how-to/reuse-texts.md.

        Args:
            texts: Texts of the chunks. The first comes after the last; one that does not fit into the context with the
                one before it comes alone.
            alone: Compute each by itself.

        Raises:
            OptionError: there is no chunk store, or a chunk that it cannot hold, or that is longer than the context.
        """
        prompts = [
            Prompt([Chunk(text)] if alone or len(texts) == 1 else [self._before(texts[n - 1], text), Chunk(text)])
            for n, text in enumerate(texts)
        ]
        if prompts:
            self.generate(prompts, SamplingParams(max_tokens=1, temperature=0), cache=CacheOptions(method="full"))

    def _before(self, text: str, chunk: str) -> str:
        """Return a text to compute a chunk after; empty where both do not fit into the context."""
        context = self.engine.context_length
        if context is None or self.tokenizer is None:
            return text
        n = sum(len(self.tokenizer(part)["input_ids"]) for part in (text, chunk))
        return text if n < context else ""

    def tune_alpha(
        self,
        texts: Sequence[str],
        bound: float,
        *,
        prompts: int = 12,
        chunks: int = 4,
        question: int = 32,
        seed: int = 0,
    ) -> AlphaFit:
        """Fit the `alpha` of a chunk store to a bound on the KL divergence from plain prompts.

        The engine's store is filled with the texts, see `store_chunks`. A prompt is some of them in random order, and
        as its question the begin of a further one.

        Args:
            texts: Texts of the chunks, more than `chunks`.
            bound: Largest mean KL divergence over the tokens of the questions, in nats, above 0.
            prompts: Prompts to measure.
            chunks: Chunks of each.
            question: Tokens of each question, at most.
            seed: Seed of the draw.

        Returns:
            The least alpha that keeps to the bound, and all trials. The store keeps the alpha that it has.

        Raises:
            OptionError: there is no chunk store, too few texts, a bound that cannot be kept, or texts that do not fit.
        """
        store = self.engine.config.chunk_store
        if store is None:
            raise OptionError("alpha is that of a chunk store, and this engine has none; open it with chunk_store=")
        self.store_chunks(texts)
        alpha = store.alpha
        try:
            return tune_alpha(
                self.engine._parts, texts, bound, prompts=prompts, chunks=chunks, question=question, seed=seed
            )
        finally:
            store.alpha = alpha

    def stats(self) -> EngineStats:
        """Return the figures of the engine, see `Engine.stats`."""
        return self.engine.stats()

    @property
    def sessions(self) -> SessionStore | None:
        """Caches of finished turns on the disk; None without `cache_dir`."""
        return self.engine.sessions

    def close(self) -> None:
        """Free all memory, and give the model its own attention back."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _outputs(self) -> Iterator[RequestOutput]:
        while self.engine.busy:
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                if output.finished:
                    yield output


def open_engine(model: Any, config: EngineConfig, loading: LoadOptions) -> tuple[Engine, Placement | None]:
    """Return an engine with a model, and the placement if its memory is limited.

    Raises:
        OptionError, BudgetError, UnsupportedModelError, DataError: as `LLM`.
    """
    dtype, tokenizer, threads = dtype_name(loading.dtype), loading.tokenizer, loading.threads
    if not loading.is_limited and not _packed_here(model, dtype, config):
        if loading.device is not None and not isinstance(model, str | PathLike):
            raise OptionError(f"device={loading.device!r} is for a model that is loaded here; move a loaded one itself")
        device = loading.usable_gpu()
        loaded, tokenizer = load(model, tokenizer, dtype, threads, config.weights, config.trust_remote_code)
        processor = loading.image_processor
        if processor is None and isinstance(model, str | PathLike) and hasattr(loaded.config, "vision_config"):
            processor = find_image_processor(model)
        if device is not None:
            check_dtype_there(device, loaded.dtype)
            check_room_for(device, sum(part.nbytes for part in (*loaded.parameters(), *loaded.buffers())))
            loaded = loaded.to(device)
        return Engine(loaded, tokenizer, config, image_processor=processor), None
    if loading.image_processor is not None:
        raise OptionError("image_processor= is for models in memory; leave it out with memory=, plan= or weights=")
    if not isinstance(model, str | PathLike):
        raise OptionError("memory= and plan= belong to a model that is opened here; give its name or folder")
    if config.trust_remote_code:
        raise OptionError(
            "trust_remote_code=True: with memory=, plan= or weights= the layers run natively, and no code of the "
            "folder does; leave it out"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    folder = folder_of(model, dtype)
    tokenizer = find_tokenizer(folder) if tokenizer is None else tokenizer  # damaged ones are refused before weights
    if loading.disk is not None and config.prefix_disk is not None and config.prefix_folder is None:
        config = replace(config, prefix_folder=loading.disk)
    opened = loading.open(model, dtype, config)
    try:
        engine = Engine(
            opened.model, tokenizer, opened.config, streamed=opened.streamed, tier=opened.tier, host_kv=opened.host_kv
        )
    except BaseException:
        for part in (opened.streamed, opened.tier):
            if part is not None:
                part.close()
        raise
    return engine, opened.placement


def _packed_here(model: Any, dtype: str | None, config: EngineConfig) -> bool:
    """Return whether a model's matrices are packed one by one, and it is never loaded whole."""
    if config.weights is None or not isinstance(model, str | PathLike):
        return False
    return has_safetensors(Path(resolve(model, "auto" if dtype is None else dtype)))


def load(
    model: Any,
    tokenizer: Any,
    dtype: str | None,
    threads: int | None,
    weights: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Return a model and its tokenizer, loaded if `model` is a name or a folder.

    The tokenizer is None for a folder without one.

    Raises:
        OptionError: it cannot be loaded, or a dtype, quantized weights or its own code requested of a loaded model.
        DataError: a damaged or hostile file.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if isinstance(model, str | PathLike):
        tokenizer = find_tokenizer(model, trust_remote_code=trust_remote_code) if tokenizer is None else tokenizer
        return load_model(model, "auto" if dtype is None else dtype, trust_remote_code=trust_remote_code), tokenizer
    if dtype is not None:
        raise OptionError(f"dtype={dtype!r} belongs to a model that is loaded here; a loaded one has its own")
    if trust_remote_code:
        raise OptionError("trust_remote_code=True is for a model that is loaded here; leave it out for a loaded one")
    if weights is not None:
        raise OptionError(
            f"weights={weights!r} empties the modules of the model; pass the model's name or folder, so that it is "
            "loaded for this engine alone"
        )
    return model, tokenizer


def _with_progress(outputs: Iterator[RequestOutput], total: int) -> Iterator[RequestOutput]:
    """Yield the outputs, and show a bar of how many there were."""
    yield from require("rich.progress", "cli", "progress=True").track(outputs, description="generating", total=total)
