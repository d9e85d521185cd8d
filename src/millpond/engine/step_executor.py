"""Execution of one engine step: a pass over prompt segments and decoding batches, and the next tokens of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress

import numpy as np
import torch
from torch import Tensor

from millpond.cache.batch_cache import BatchCache
from millpond.cache.layer.prompt_pass import PartialSpan
from millpond.engine.chunks.late import LateChunks
from millpond.engine.completion import CompletionState, with_texts
from millpond.engine.components import Components
from millpond.engine.decode_group import DecodeGroup, Figures
from millpond.engine.forget import drop_read
from millpond.engine.next_tokens import Choices, NextTokens
from millpond.engine.prompt_end import PromptEnd
from millpond.engine.request_state import RequestState
from millpond.engine.sampling.token_scores import score_tokens
from millpond.kernels.transfers import on_device
from millpond.models.lean.decoder import GivenRows
from millpond.runner.packed_cache import Segment
from millpond.runner.packed_model import PackedModel


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Some tokens of a prompt.

    Attributes:
        batch_cache: Cache of the prompt alone.
        ids: The tokens, (n,) int64.
        start: Index of the first in the prompt.
        ends: Whether the prompt ends with them.
        every_row: Whether the logits of all tokens are needed; else of none, or of the last where the prompt ends.
        span: Choice of the tokens to compute, in a prompt with chunks; None: all.
        given: Places of image tokens in the segment, (m,) int64, and their embeddings (m, width); None: it has none.
    """

    batch_cache: BatchCache
    ids: np.ndarray
    start: int
    ends: bool
    every_row: bool
    span: PartialSpan | None = None
    given: tuple[np.ndarray, Tensor] | None = None

    @property
    def computed(self) -> np.ndarray:
        """Indices of the tokens that are computed, (R,) int64."""
        return np.arange(len(self.ids)) if self.span is None else self.span.rows.numpy()

    @property
    def rows(self) -> range:
        """Rows of the segment whose logits are needed."""
        n = len(self.computed)
        return range(0 if self.every_row else n - 1 if self.ends else n, n)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A decoding step whose tokens the host has not read.

    Attributes:
        completions: Answers that took part, in the order of their rows.
        choices: Their next tokens.
        figures: Sizes of their caches behind the pass, of each group.
    """

    completions: list[CompletionState]
    choices: Choices
    figures: list[Figures]


def run(
    model: PackedModel,
    groups: Sequence[DecodeGroup],
    prompt_segments: Sequence[PromptSegment],
    newest: Tensor | None = None,
) -> list[Tensor]:
    """Run one forward pass.

    Args:
        model: The model.
        groups: Groups that decode.
        prompt_segments: Prompts that are read.
        newest: Newest tokens of all answers of the groups, (n,) int64 where the model is, if the host has not read
            them; no prompt is read then.

    Returns:
        Logits (n, vocabulary) per group, one row per answer, then per prompt segment those that it needs.
    """
    assert newest is None or not prompt_segments, "a pass of decoding answers alone"
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[Segment] = []
    needed: list[np.ndarray] = []
    given: list[tuple[np.ndarray, Tensor]] = []
    begin = 0

    def add_segment(
        cache: BatchCache, segment_positions: np.ndarray, rows: range, span: PartialSpan | None, decoding: bool
    ) -> None:
        nonlocal begin
        n = len(segment_positions)
        segments.append(Segment(cache.layers, begin, begin + n, decoding, cache.states, cache, span))
        positions.append(segment_positions)
        needed.append(begin + np.arange(rows.start, rows.stop))
        begin += n

    for group in groups:
        if group.cache_factory.reach is not None:
            group.close_gaps(group.cache_factory.reach)
        n = len(group.completions)
        if newest is None:
            ids.append(np.array([completion.newest for completion in group.completions], dtype=np.int64))
            own = on_device(ids[-1], model.device)
        else:
            own = newest[begin : begin + n]
        group.batch_cache.begin(own[:, None])
        add_segment(group.batch_cache, group.batch_cache.tracker.seen.astype(np.int64), range(n), None, True)
    for segment in prompt_segments:
        cache, rows = segment.batch_cache, segment.computed
        cache.begin(on_device(segment.ids[None], model.device))
        if segment.given is not None:
            given.append((begin + segment.given[0], segment.given[1]))
        begin_at = segment.start - int(cache.tracker.closed.sum())  # of its only sequence, if it has begun
        ids.append(segment.ids[rows])
        add_segment(cache, begin_at + rows, segment.rows, segment.span, False)
    logit_rows = np.concatenate(needed)
    no_logits = not len(logit_rows)  # a part of a prompt alone: the model still wants a row
    model_rows = on_device(np.array([begin - 1]) if no_logits else logit_rows, model.device)
    logits = model.forward(
        on_device(np.concatenate(ids), model.device) if newest is None else newest,
        on_device(np.concatenate(positions), model.device),
        segments,
        model_rows,
        _joined(given, model.device),
    )
    ends = np.cumsum([len(rows) for rows in needed]).tolist()
    return [logits[end - len(rows) : end] for end, rows in zip(ends, needed, strict=True)]


def _joined(given: Sequence[tuple[np.ndarray, Tensor]], device: torch.device) -> GivenRows | None:
    """Return the rows of all segments whose embeddings are given; None: there are none."""
    if not given:
        return None
    rows = on_device(np.concatenate([places for places, _ in given]), device)
    return GivenRows(rows, torch.cat([vectors for _, vectors in given]))


class StepExecutor:
    """Runs passes. It ends answers, and retires no request: the engine does that.

    Args:
        parts: Parts of the engine.
    """

    def __init__(self, parts: Components) -> None:
        self._counts, self._tokenizer, self._requests = parts.counts, parts.tokenizer, parts.requests
        self._model, self._scheduler, self._next_tokens = parts.model, parts.scheduler, NextTokens(parts)
        self._prefix_cache, self._chunk_reuse = parts.prefix_cache, parts.chunk_reuse
        self._prompt_end, self._late_chunks = PromptEnd(parts), LateChunks(parts)

    def run(self, groups: list[DecodeGroup], reading: list[tuple[RequestState, int]]) -> list[RequestState]:
        """Run one pass for groups that decode and for prompts that are read.

        Args:
            groups: Groups that decode.
            reading: Requests, with the number of tokens that are read of their prompts.

        Returns:
            Requests with new tokens.

        Raises:
            Exception: the pass failed, of all or for one of them: caches hold some layers' part of it.
        """
        begun = [(state, n, part) for state, n in reading if (part := self._begin_segment(state, n)) is not None]
        ended_states = [state for state, _ in reading if state.failed]
        reading, segments = [(state, n) for state, n, _ in begun], [part for _, _, part in begun]
        if not groups and not segments:
            return ended_states
        began = time.perf_counter()
        waits = self._late_chunks.begin_pass(state for state, _ in reading)
        logits = run(self._model, groups, segments)
        if self._chunk_reuse is not None and segments and not waits:
            n_rows = sum(len(segment.computed) for segment in segments)
            n_rows += sum(len(group.completions) for group in groups)
            self._chunk_reuse.passed(n_rows, time.perf_counter() - began)
        lost_states = self._fail_lost(groups, reading)
        ended_states += lost_states
        completions: list[CompletionState] = []
        rows: list[Tensor] = []
        for group, group_logits in zip(groups, logits, strict=False):
            unfinished_rows = [index for index, completion in enumerate(group.completions) if not completion.finished]
            completions += [group.completions[index] for index in unfinished_rows]
            rows.append(group_logits if len(unfinished_rows) == len(group_logits) else group_logits[unfinished_rows])
        read: list[RequestState] = []
        partly: list[RequestState] = []
        for (state, n), segment, segment_logits in zip(reading, segments, logits[len(groups) :], strict=True):
            if self._late_chunks.begins_again(state):
                continue
            self._add_computed_tokens(state, n, len(segment.computed))
            if state in lost_states:
                continue
            self._end_segment(state, segment, segment_logits)
            if state.failed:
                ended_states.append(state)
            elif segment.ends:
                read.append(state)
                unfinished = state.unfinished
                completions += unfinished
                rows.append(segment_logits[-1:].expand(len(unfinished), -1))
            else:
                partly.append(state)
        if completions:
            self._choose(completions, rows[0] if len(rows) == 1 else torch.cat(rows))
        self._prompt_end.finish_prompts(read)
        for state in partly:
            with state.own_work():
                self._prefix_cache.insert_blocks(state)
            ended_states += [state] if state.failed else []
        for group in dict.fromkeys([*groups, *(state.group for state in read)]):
            group.update_stats()
        return list(dict.fromkeys([*ended_states, *(self._requests.owner(completion) for completion in completions)]))

    # ------------------------------------------------------------------ prompts

    def _begin_segment(self, state: RequestState, n: int) -> PromptSegment | None:
        """Return the next `n` tokens of a prompt; None: the request has failed and ended."""
        if state.times.started is None:
            state.times = replace(state.times, started=time.monotonic())
        with state.own_work():
            return self._segment(state, n)
        return None

    def _segment(self, state: RequestState, n: int) -> PromptSegment:
        if state.private_cache is None:
            state.private_cache = state.group.cache_factory.make_cache(len(state.ids))
        if not state.private_cache.tracker.marks.hold(state.marks):
            state.private_cache.mark(state.marks)
        start = state.scheduled.num_computed_tokens
        ends = start + n == len(state.ids) and not state.scheduled.is_shared_prefix
        span = None if state.blend is None else state.blend.span(start, start + n)
        ids, every_row = state.ids_array[start : start + n], state.prompt_logprobs is not None
        image_rows = None if state.images is None else state.images.vectors(start, start + n)
        given = None if image_rows is None else (image_rows[0] - start, image_rows[1])
        return PromptSegment(state.private_cache, ids, start, ends, every_row, span, given)

    def _add_computed_tokens(self, state: RequestState, n: int, computed: int) -> None:
        """Count `n` more tokens of a prompt in its cache, of which `computed` were computed."""
        if computed < n:
            self._scheduler.add_computed_tokens(state.scheduled, n - computed, served=False)
            self._counts["reused_tokens"] += n - computed
        self._scheduler.add_computed_tokens(state.scheduled, computed)
        self._counts["prompt_tokens"] += computed

    def _end_segment(self, state: RequestState, segment: PromptSegment, logits: Tensor) -> None:
        """Finish a segment of a prompt, before its tokens are chosen or the next segment is read."""
        with state.own_work():
            self._score_prompt(state, segment, logits)
            if state.marks.forget:
                drop_read(state)
            if not segment.ends and state.compacts_after(0):
                self._prompt_end.compact_context(state)
            if segment.ends and state.blend is not None:
                state.blend.finish()

    def _score_prompt(self, state: RequestState, segment: PromptSegment, logits: Tensor) -> None:
        """Record log probabilities of the tokens after those that were read, if requested."""
        if state.prompt_logprobs is None:
            return
        tokens = state.ids[segment.start + 1 : segment.start + len(segment.ids) + 1]
        top = [state.request.params.prompt_logprobs or 0] * len(tokens)
        for token, (logprob, likeliest) in zip(tokens, score_tokens(logits[: len(tokens)], tokens, top), strict=True):
            state.prompt_logprobs.append(with_texts(self._tokenizer, token, logprob, likeliest))

    def _fail_lost(self, groups: list[DecodeGroup], reading: list[tuple[RequestState, int]]) -> list[RequestState]:
        """End the requests whose keys and values could not be read from the disk or written to it."""
        ended_states = []
        for state, _ in reading:
            for error in [] if state.private_cache is None else state.private_cache.pop_failed().values():
                state.fail(error)
                ended_states.append(state)
        for group in groups:
            for sequence, error in group.batch_cache.pop_failed().items():
                state = self._requests.owner(group.completions[sequence])
                state.fail(error)
                ended_states.append(state)
        return ended_states

    # ------------------------------------------------------------------ next tokens

    def launch(self, groups: list[DecodeGroup], before: LaunchedStep | None) -> LaunchedStep:
        """Launch a step of groups that only decode; nothing of it is read.

        Args:
            groups: Groups that decode.
            before: Step with all their answers whose tokens were not read; None: all were.

        Raises:
            Exception: the pass failed, see `run`.
        """
        completions = [completion for group in groups for completion in group.completions]
        newest = None if before is None else before.choices.newest(completions)
        logits = run(self._model, groups, [], newest)
        choices = self._next_tokens.launch(completions, logits[0] if len(logits) == 1 else torch.cat(logits), newest)
        return LaunchedStep(completions, choices, [group.figures() for group in groups])

    def settle(self, step: LaunchedStep) -> list[RequestState]:
        """Read the tokens of a launched step, and return the requests that got some.

        Others have ended before.
        """
        is_open = [not completion.finished for completion in step.completions]
        advanced = dict.fromkeys(self._requests.owner(completion) for completion in compress(step.completions, is_open))
        self._next_tokens.take(step.choices)
        figures = chain.from_iterable(figures() for figures in step.figures)
        for completion, size in compress(zip(step.completions, figures, strict=True), is_open):
            completion.count(size)
        return list(advanced)

    def _choose(self, completions: list[CompletionState], logits: Tensor) -> None:
        """Choose the next token of every answer; end those whose logits allow none.

        Requests for which this fails end too. An answer whose cache began again takes the tokens that it has.
        """
        new_rows = [index for index, completion in enumerate(completions) if not completion.replaying]
        if len(new_rows) < len(completions):
            for completion in completions:
                if completion.replaying:
                    completion.replay()
            completions, logits = [completions[index] for index in new_rows], logits[new_rows]
        self._next_tokens.take(self._next_tokens.launch(completions, logits))


def names_of(groups: Sequence[DecodeGroup], reading: Sequence[tuple[RequestState, int]]) -> tuple[str, ...]:
    """Return the names of the requests of a pass, without common prefixes of a batch."""
    decoding = (completion.key[0] for group in groups for completion in group.completions)
    return tuple(dict.fromkeys([*decoding, *(state.request.request_id for state, _ in reading if state.completions)]))
