"""Validation of a request, which makes its state in the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import get_args

from millpond.cache.paging.choose import keeps_prompts
from millpond.engine.chunks.prompt import Chunk, Prompt, PromptSpan, tokenized
from millpond.engine.completion import CompletionState
from millpond.engine.components import Components
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.diagonal_schedule import growth_bytes
from millpond.engine.memory_estimate import estimate
from millpond.engine.outputs import Times, TokenLogprob
from millpond.engine.prompt_images import images_of
from millpond.engine.prompt_marks import answer_without_loss, block_ends, check_marks
from millpond.engine.request import MAX_SALT, OnPressure, Request
from millpond.engine.request_state import RequestState
from millpond.engine.scheduler_request import MemoryNeed, SchedulerRequest
from millpond.engine.sharing import can_share
from millpond.errors import BudgetError, ImageError, OptionError, unknown
from millpond.policy.reuse import check_pick, check_recompute
from millpond.runner.packed_model import check_tokens


class RequestValidator:
    """Checks requests against the model, the memory and the scheduler's limits.

    Args:
        parts: Parts of the engine.
    """

    def __init__(self, parts: Components) -> None:
        self._chunks, self._prefix_cache = parts.chunk_reuse, keeps_prompts(parts.config.prefix_cache)
        self._on_pressure, self._image_numbers = parts.config.on_pressure, parts.image_numbers
        self._model, self._decode_groups, self._memory_limit = parts.model, parts.decode_groups, parts.memory
        self._scheduler, self._sampler, self._tokenizer = parts.scheduler, parts.sampler, parts.tokenizer

    def validate(self, request: Request, ids: tuple[int, ...] | None = None) -> RequestState:
        """Check a request and return its state.

        Args:
            request: The request.
            ids: Tokens of the prompt, where they are known.

        Raises:
            OptionError: a prompt that is empty, longer than the model's context or needs a tokenizer; a value out of
                range. Also what `compress` raises.
            BudgetError: the request can never fit the memory.
            ImageError: images that the model does not take, or in other places than the prompt's.
        """
        arrived = time.monotonic()
        ids, spans = self.ids_of(request) if ids is None else (ids, [])
        images = images_of(ids, request.images, self._model.images, self._image_numbers)
        most = self._max_new_tokens(request, len(ids))
        params = request.params
        self._sampler.check(params, self._model.vocabulary)
        self._check_known(request.known, params.n, most)
        if params.stop and self._tokenizer is None:
            raise OptionError("stop texts need a tokenizer; give stop_token_ids, or the engine its tokenizer")
        if params.n > self._scheduler.max_running:
            raise OptionError(f"n={params.n} is more than the {self._scheduler.max_running} answers that may run")
        if request.deadline is not None and not request.deadline > 0:
            raise OptionError(f"deadline={request.deadline} seconds: must be more than 0")
        salt = request.cache_salt
        if salt is not None and not 0 < len(salt) <= MAX_SALT:
            raise OptionError(f"cache_salt has {len(salt)} characters: must have 1 to {MAX_SALT}, or be None")
        group = self._decode_groups.group(request.cache)
        group.cache_factory.check_prompt(len(ids))
        most = self._within_budget(request, group, len(ids), most)
        check_marks(request.marks, group.cache_factory, self._model.layers, len(ids), bool(spans))
        if spans and images is not None:
            raise ImageError("a prompt with chunks has images: chunks are texts; give their texts without Chunk")
        if spans and not self._uses_chunks(request, spans, group):
            spans = []
        reach = group.cache_factory.reach
        if spans and reach is not None and len(ids) > reach:
            raise OptionError(
                f"a prompt with chunks has {len(ids)} tokens, and the model's context holds {reach}: with "
                "overflow='rolling' only prompts without chunks may be longer"
            )
        need = estimate(group.cache_factory, group.cache_factory.within_context(len(ids)), most, params.n)
        self._check_need(need, params.n, len(ids), most)
        scheduled = SchedulerRequest(
            request.request_id,
            len(ids),
            need,
            params.n,
            request.client,
            request.priority,
            None if request.deadline is None else arrived + request.deadline,
            group.cache_factory.whole_prompt and not group.cache_factory.piece,
            piece=group.cache_factory.piece,
            max_new_tokens=most,
            growth=self._later(group, len(ids), most, params.n),
        )
        completions = [
            CompletionState((request.request_id, index), params, most, self._model.end_tokens, self._tokenizer)
            for index in range(params.n)
        ]
        logprobs: list[TokenLogprob | None] | None = None if params.prompt_logprobs is None else [None]
        return RequestState(
            request,
            ids,
            scheduled,
            group,
            completions,
            Times(arrived),
            prompt_logprobs=logprobs,
            spans=spans,
            images=images,
            stops=self._stops(request, len(ids), bool(spans), group),
        )

    def _later(self, group: DecodeGroup, n_tokens: int, most: int, n: int) -> tuple[int, ...]:
        """Return the bytes that an answer does not hold yet after each part of it.

        Empty where the scheduler does not count with ages.
        """
        if not self._scheduler.spreads:
            return ()
        prompt = group.cache_factory.within_context(n_tokens)
        return growth_bytes(lambda new: estimate(group.cache_factory, prompt, new, n).each, most)

    def _check_need(self, need: MemoryNeed, n: int, prompt: int, most: int) -> None:
        """Check that a request fits in memory alone.

        Where its memory is promised to it, all of it must fit, else its prompt.

        Raises:
            BudgetError: it does not.
        """
        limit = self._memory_limit.limit_bytes
        if limit is None:
            return
        if self._scheduler.limit_bytes is not None and need.peak(n) > limit:
            raise BudgetError(
                f"a prompt of {prompt} tokens and {n} x {most} new ones may need {need.peak(n):,} bytes of cache "
                f"({need.prefill:,} while the prompt is read), and all requests together have {limit:,}; shorten it, "
                "lower max_tokens or the budget, or raise kv_memory"
            )
        if need.prefill > limit:
            raise BudgetError(
                f"a prompt of {prompt} tokens needs {need.prefill:,} bytes of cache while it is read, and the GPU has "
                f"{limit:,} for all requests together; shorten it, or lower max_step_tokens or max_running"
            )

    def _within_budget(self, request: Request, group: DecodeGroup, n_tokens: int, most: int) -> int:
        """Return the new tokens of an answer; fewer where nothing of the prompt may be evicted.

        Raises:
            OptionError, BudgetError: see `answer_without_loss`; or there is no such value of on_pressure.
        """
        on_pressure = self._on_pressure if request.cache.on_pressure is None else request.cache.on_pressure
        if on_pressure not in get_args(OnPressure):
            raise unknown("on_pressure", on_pressure, get_args(OnPressure))
        if on_pressure == "evict":
            return most
        max_tokens, context = request.params.max_tokens, self._model.context_length
        return answer_without_loss(group.cache_factory, self._model.layers, n_tokens, max_tokens, most, context)

    def _stops(self, request: Request, n_tokens: int, chunks: bool, group: DecodeGroup) -> list[int]:
        """Return the ends of blocks at which sums over a prompt's queries are kept."""
        if (
            not group.cache_factory.policy.sums_prompt
            or self._no_use_of_breakpoints(request, chunks, group) is not None
        ):
            return []
        return block_ends(request.marks.breakpoints, n_tokens, group.slots)

    def require_breakpoints(self, request: Request) -> None:
        """Check that later prompts can continue from the breakpoints of a request.

        Raises:
            OptionError: they cannot; the message says why.
        """
        if not request.marks.breakpoints:
            return
        chunks = isinstance(request.prompt, Prompt) and any(isinstance(p, Chunk) for p in request.prompt.parts)
        reason = self._no_use_of_breakpoints(request, chunks, self._decode_groups.group(request.cache))
        if reason is not None:
            raise OptionError(f"breakpoints={request.marks.breakpoints}: {reason}; or leave breakpoints out")

    def _no_use_of_breakpoints(self, request: Request, chunks: bool, group: DecodeGroup) -> str | None:
        """Return why no other prompt can continue from a prompt, and the way out; None: it can."""
        if not self._prefix_cache:
            return "this engine keeps no prompts: give it prefix_cache=True"
        if chunks:
            return "a prompt with chunks is not shared: give its text in one piece"
        if request.params.prompt_logprobs is not None:
            return "a prompt whose log probabilities are wanted is not shared: leave out prompt_logprobs"
        if not can_share(group.cache_factory):
            return (
                f"{group.cache_factory.described} shares no beginnings of prompts, see docs/explanation/engine.md: use "
                "another method or number format"
            )
        return None

    def _uses_chunks(self, request: Request, spans: list[PromptSpan], group: DecodeGroup) -> bool:
        """Return whether a prompt uses the chunk store, see `ChunkReuse.check`.

        Raises:
            OptionError: a prompt with chunks that the engine cannot run; the message says why.
        """
        if self._chunks is None:
            raise OptionError(
                "the prompt holds chunks and the engine has no chunk store; give chunk_store=ChunkStore(folder) to "
                "LLM, or the texts without Chunk"
            )
        method = request.cache.method or str(self._decode_groups.defaults.method)
        return self._chunks.check(
            group.cache_factory, method, spans, request.cache, request.params.prompt_logprobs is not None
        )

    def ids_of(self, request: Request) -> tuple[tuple[int, ...], list[PromptSpan]]:
        """Return the tokens of a prompt, and its parts where it holds chunks.

        Raises:
            OptionError: see `validate`.
        """
        check_recompute(request.cache.recompute)
        check_pick(request.cache.pick)
        spans: list[PromptSpan] = []
        if isinstance(request.prompt, Prompt):
            ids, spans = tokenized(request.prompt, self._tokenizer)
        elif isinstance(request.prompt, str):
            if self._tokenizer is None:
                raise OptionError("a prompt of text needs a tokenizer; give token ids, or the engine its tokenizer")
            ids = tuple(int(i) for i in self._tokenizer(request.prompt)["input_ids"])
        else:
            ids = tuple(int(i) for i in request.prompt)
        check_tokens(ids, self._model.vocabulary)
        return ids, spans if any(span.is_chunk for span in spans) else []

    def _check_known(self, known: Sequence[Sequence[int]], n: int, most: int) -> None:
        """Check the known tokens of the answers.

        Raises:
            OptionError: known tokens of another number of answers, more than an answer may have, or no tokens.
        """
        if known and len(known) != n:
            raise OptionError(f"known has tokens of {len(known)} answers, and n={n}; give those of each, or none")
        for tokens in known:
            if len(tokens) > most:
                raise OptionError(f"known has {len(tokens)} tokens of an answer of at most {most}; give fewer")
            if tokens:
                check_tokens(tokens, self._model.vocabulary)

    def _max_new_tokens(self, request: Request, prompt: int) -> int:
        """Return the tokens that an answer may have."""
        context, max_tokens = self._model.context_length, request.params.max_tokens
        if context is None:
            if max_tokens is None:
                raise OptionError("the model sets no limit to a text: give max_tokens")
            return max_tokens
        if self._decode_groups.reach is not None:
            return context if max_tokens is None else max_tokens
        if prompt >= context:
            raise OptionError(
                f"the prompt has {prompt} tokens, and the model's context holds {context} with the answer"
            )
        return context - prompt if max_tokens is None else min(max_tokens, context - prompt)
