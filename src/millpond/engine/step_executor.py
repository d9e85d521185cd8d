"""Execution of one engine step: prompt segments, next tokens, and plans of prompts that end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from millpond.cache.batch_cache import BatchCache, Pages
from millpond.cache.layer.prompt_pass import PartialSpan
from millpond.engine.completion import CompletionState, ReuseCounts, with_texts
from millpond.engine.components import Components
from millpond.engine.decode_group import DecodeGroup, figures_of
from millpond.engine.forget import drop_read, note_dropped, note_forgotten, until_forgotten
from millpond.engine.prefix_sharing import together
from millpond.engine.request_state import RequestState
from millpond.engine.sampling.sampler import BadLogitsError, Sampled
from millpond.engine.sampling.token_choice import score_tokens
from millpond.engine.scheduler import Job, State, Step
from millpond.runner.packed_cache import Segment
from millpond.runner.packed_model import PackedModel


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Some tokens of a prompt.

    Attributes:
        stack: its cache. ids: (n,) int64, the tokens. start: place of the first in the prompt.
        span: of a prompt with chunks, which of these tokens are computed; None: all.
        every_row: the logits of all tokens are needed; else of none, or of the last where it `ends` the prompt.
    """

    stack: BatchCache
    ids: np.ndarray
    start: int
    ends: bool
    every_row: bool
    span: PartialSpan | None = None

    @property
    def computed(self) -> np.ndarray:
        """(R,) int64: which of the tokens are computed."""
        return np.arange(len(self.ids)) if self.span is None else self.span.rows.numpy()

    @property
    def rows(self) -> range:
        """Rows of its own whose logits are needed."""
        n = len(self.computed)
        return range(0 if self.every_row else n - 1 if self.ends else n, n)


def run(model: PackedModel, groups: Sequence[DecodeGroup], readings: Sequence[PromptSegment]) -> list[Tensor]:
    """One forward pass.

    Returns:
        Logits (n, vocabulary) per group, one row per answer, then per reading those that it needs.
    """
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[Segment] = []
    asked: list[np.ndarray] = []
    begin = 0

    def put(
        stack: BatchCache, tokens: np.ndarray, places: np.ndarray, rows: range, span: PartialSpan | None, decoding: bool
    ) -> None:
        nonlocal begin
        segments.append(Segment(stack.layers, begin, begin + len(tokens), decoding, stack.states, stack, span))
        ids.append(tokens)
        positions.append(places)
        asked.append(begin + np.arange(rows.start, rows.stop))
        begin += len(tokens)

    for group in groups:
        if group.recipe.reach is not None:
            group.close_gaps(group.recipe.reach)
        newest = np.array([answer.newest for answer in group.answers], dtype=np.int64)
        group.stack.begin(torch.from_numpy(newest[:, None]).to(model.device))
        put(group.stack, newest, group.stack.timeline.seen.astype(np.int64), range(len(newest)), None, True)
    for reading in readings:
        reading.stack.begin(torch.from_numpy(reading.ids[None]).to(model.device))
        rows = reading.computed
        begin_at = reading.start - int(reading.stack.timeline.closed.sum())  # of its only sequence, if it has begun
        put(reading.stack, reading.ids[rows], begin_at + rows, reading.rows, reading.span, False)
    chosen = np.concatenate(asked)
    dummy = not len(chosen)  # a part of a prompt alone: the model still wants a row
    wanted = torch.from_numpy(np.array([begin - 1]) if dummy else chosen).to(model.device)
    logits = model.forward(
        torch.from_numpy(np.concatenate(ids)).to(model.device),
        torch.from_numpy(np.concatenate(positions)).to(model.device),
        segments,
        wanted,
    )
    ends = np.cumsum([len(needed) for needed in asked]).tolist()
    return [logits[end - len(needed) : end] for end, needed in zip(ends, asked, strict=True)]


#: Steps that a prompt waits for others to read what it begins with, before it reads that itself.
MOST_WAITED = 8


class StepExecutor:
    """Runs steps. It ends answers, and forgets none: that is the engine's business."""

    def __init__(self, parts: Components) -> None:
        self._counts, self._tokenizer, self._requests = parts.counts, parts.tokenizer, parts.requests
        self._chunks, self._loads, self._sessions = parts.chunk_reuse, parts.chunk_loads, parts.sessions
        self._model, self._scheduler, self._sampler = parts.model, parts.scheduler, parts.sampler
        self._sharing, self._trunks = parts.prefix_cache, parts.shared_prefixes

    def attach_prefixes(self, step: Step) -> list[RequestState]:
        """Let prompts that begin in a step take over what others have read; fewer of their tokens are read then.

        One whose next block is being read for another waits for it, a few steps at most.

        Returns:
            Requests that have ended, since this failed.
        """
        begun = [live for live in self._requests.with_status(State.READING) if live.stack is not None]
        chunks: list[tuple[Job, int]] = []
        failed = []
        for job, n in step.chunks:
            live = self._requests[job.key]
            with live.own_work():
                if live.stack is None and live.trunk is None:
                    if self._waits(live, begun):
                        continue
                    self._sharing.meet(live, self._requests)
                    begun.append(live)
                chunks.append((job, until_forgotten(live, _within_reach(live, self._share(live, n)))))
            if live.failed:
                failed.append(live)
        step.chunks = chunks
        return failed

    def _waits(self, live: RequestState, reading: list[RequestState]) -> bool:
        """Whether a prompt lets this step pass, because another is read that it begins with.

        A prompt that can only begin where sums are kept waits as long as the other comes nearer to that place.
        """
        if live.waited >= MOST_WAITED:
            return False
        reader = self._sharing.reader(live, reading)
        if reader is None:
            return False
        if live.group.recipe.policy.sums_prompt and reader.job.read > live.reader_read:
            live.waited, live.reader_read = 0, reader.job.read
        else:
            live.waited += 1
        return True

    def run(self, groups: list[DecodeGroup], reading: list[tuple[RequestState, int]]) -> list[RequestState]:
        """One pass for groups that decode, and for requests with the number of tokens that are read of their prompts.

        Returns:
            Requests with new tokens.

        Raises:
            Exception: the pass failed, of all or for one of them: caches hold some layers' part of it.
        """
        begun = [(live, n, part) for live, n in reading if (part := self._begin(live, n)) is not None]
        ended = [live for live, _ in reading if live.failed]
        reading, readings = [(live, n) for live, n, _ in begun], [part for _, _, part in begun]
        if not groups and not readings:
            return ended
        logits = run(self._model, groups, readings)
        lost = self._end_lost(groups, reading)
        ended += lost
        answers: list[CompletionState] = []
        rows: list[Tensor] = []
        for group, found in zip(groups, logits, strict=False):
            stay = [place for place, answer in enumerate(group.answers) if not answer.finished]
            answers += [group.answers[place] for place in stay]
            rows.append(found if len(stay) == len(found) else found[stay])
        read: list[RequestState] = []
        partly: list[RequestState] = []
        for (live, n), part, found in zip(reading, readings, logits[len(groups) :], strict=True):
            self._mark_read(live, n, len(part.computed))
            if live in lost:
                continue
            with live.own_work():
                self._score_prompt(live, part, found)
                if live.forget:
                    drop_read(live)
                if not part.ends and live.rolls(0):
                    self._sharing.keep_blocks(live)
                    self._roll(live)
                if part.ends and live.blend is not None:
                    live.blend.finish()
            if live.failed:
                ended.append(live)
            elif part.ends:
                read.append(live)
                going = live.unfinished
                answers += going
                rows.append(found[-1:].expand(len(going), -1))
            else:
                partly.append(live)
        if answers:
            self._choose(answers, rows[0] if len(rows) == 1 else torch.cat(rows))
        for live, later in zip(read, self._needs_behind(read), strict=True):
            self._settle(live, later)
        for live in partly:
            with live.own_work():
                self._sharing.keep_blocks(live)
            ended += [live] if live.failed else []
        for group in dict.fromkeys([*groups, *(live.group for live in read)]):
            group.update_stats()
        return list(dict.fromkeys([*ended, *(self._requests.owner(answer) for answer in answers)]))

    def _end_lost(self, groups: list[DecodeGroup], reading: list[tuple[RequestState, int]]) -> list[RequestState]:
        """End the requests whose keys and values could not be read from the disk or written to it."""
        ended = []
        for live, _ in reading:
            for error in [] if live.stack is None else live.stack.take_lost().values():
                live.fail(error)
                ended.append(live)
        for group in groups:
            for sequence, error in group.stack.take_lost().items():
                live = self._requests.owner(group.answers[sequence])
                live.fail(error)
                ended.append(live)
        return ended

    def _share(self, live: RequestState, n: int) -> int:
        """Before the first `n` tokens of a prompt are read: take over what others have read; returns how many are left.

        Of a prompt that was begun nothing changes.
        """
        if not live.job.read and live.stack is None and live.blend is None and live.spans:
            self._blend(live)
        if live.blend is not None:
            return live.blend.reach(live.job.read, n)
        if live.job.read or live.stack is not None:
            return min(n, self._sharing.next_stop(live) - live.job.read)
        shared = self._trunks.begin(live)
        if shared and self._sessions is not None:
            self._sessions.loads.forget(live)
        if not shared and (restored := self._restore(live)):
            return min(n, live.job.prompt - restored)
        shared = shared or self._sharing.begin(live)
        self._scheduler.mark_read(live.job, shared, served=False)
        self._counts["shared_tokens"] += shared if live.answers else 0
        for answer in live.answers:
            answer.shared = shared
        return min(n, self._sharing.next_stop(live) - live.job.read)

    def _restore(self, live: RequestState) -> int:
        """Let a prompt that begins go on from the stored cache of an earlier turn; returns the tokens that it read."""
        if self._sessions is None:
            return 0
        restored = self._sessions.begin(live, self._sharing.known_tokens(live))
        self._scheduler.mark_read(live.job, restored, served=False)
        self._counts["restored_tokens"] += restored
        for answer in live.answers if restored else []:
            answer.reuse = ReuseCounts(restored_tokens=restored, exact=live.restored_exact)
        note_dropped(live)
        return restored

    def _blend(self, live: RequestState) -> None:
        """Before a prompt with chunks begins: choose what is computed of it."""
        assert self._chunks is not None, "chunks without a store are refused"
        request, window = live.request, live.group.recipe.policy.window
        loaded = None if self._loads is None else self._loads.begin(live)
        live.blend = blend = self._chunks.begin(
            live.numbers, live.spans, request.cache, window, request.cache_salt, loaded
        )
        for answer in live.answers:
            answer.reuse = ReuseCounts(
                reused_tokens=blend.n_reused, recomputed_tokens=blend.n_recomputed, exact=blend.exact
            )

    def _mark_read(self, live: RequestState, n: int, computed: int) -> None:
        """`n` more tokens of a prompt are in its cache, of which `computed` were computed."""
        if computed < n:
            self._scheduler.mark_read(live.job, n - computed, served=False)
            self._counts["reused_tokens"] += n - computed
        self._scheduler.mark_read(live.job, computed)
        self._counts["prompt_tokens"] += computed

    def _begin(self, live: RequestState, n: int) -> PromptSegment | None:
        """The next `n` tokens of a prompt; None: the request has ended, since that failed."""
        if live.times.started is None:
            live.times = replace(live.times, started=time.monotonic())
        with live.own_work():
            return self._segment(live, n)
        return None

    def _segment(self, live: RequestState, n: int) -> PromptSegment:
        if live.stack is None:
            live.stack = live.group.recipe.stack(len(live.ids))
        timeline = live.stack.timeline
        if (live.kept and not timeline.kept.of(0)) or (live.fair and not timeline.fair.of(0)):
            live.stack.keep(live.kept, live.fair)
        start = live.job.read
        ends = start + n == len(live.ids) and not live.job.trunk
        span = None if live.blend is None else live.blend.span(start, start + n)
        ids, every_row = live.numbers[start : start + n], live.prompt_logprobs is not None
        return PromptSegment(live.stack, ids, start, ends, every_row, span)

    def _score_prompt(self, live: RequestState, part: PromptSegment, logits: Tensor) -> None:
        """Log probabilities of the prompt's tokens after those that were read, if requested."""
        if live.prompt_logprobs is None:
            return
        tokens = live.ids[part.start + 1 : part.start + len(part.ids) + 1]
        top = [live.request.params.prompt_logprobs or 0] * len(tokens)
        for token, (value, likeliest) in zip(tokens, score_tokens(logits[: len(tokens)], tokens, top), strict=True):
            live.prompt_logprobs.append(with_texts(self._tokenizer, token, value, likeliest))

    def _choose(self, answers: list[CompletionState], logits: Tensor) -> None:
        """The next token of every answer; those whose logits allow none end, and requests for which this fails.

        An answer whose cache began again takes the tokens that it has.
        """
        fresh = [place for place, answer in enumerate(answers) if not answer.replaying]
        if len(fresh) < len(answers):
            for answer in answers:
                if answer.replaying:
                    answer.replay()
            answers, logits = [answers[place] for place in fresh], logits[fresh]
        for answer, one in zip(answers, self._sampled(answers, logits), strict=True):
            live = self._requests.owner(answer)
            if one is None or answer.finished:
                continue
            with live.own_work():
                self._counts["generated_tokens"] += 1
                answer.take(one)
                if one.error is not None:
                    raise one.error

    def _sampled(self, answers: list[CompletionState], logits: Tensor) -> list[Sampled | None]:
        """The next token of each answer; None: it has ended."""
        keys = [answer.key for answer in answers]
        try:
            return [*self._sampler(keys, logits)]
        except BadLogitsError as error:
            bad = error.reasons
            for answer in answers:
                if answer.key in bad:
                    answer.end("error")
                    self._requests.owner(answer).error = bad[answer.key]
            good = [place for place, key in enumerate(keys) if key not in bad]
            found = iter(self._sampled([answers[place] for place in good], logits[good]))
            return [None if key in bad else next(found) for key in keys]
        except Exception as error:
            if len(answers) > 1:  # one of them, or each
                alone = [self._sampled([answer], logits[place : place + 1]) for place, answer in enumerate(answers)]
                return [one for (one,) in alone]
            self._requests.owner(answers[0]).fail(error)
            return [None]

    def _roll(self, live: RequestState) -> None:
        """The context is full and the prompt goes on: plan what was read, and close gaps."""
        stack = live.stack
        assert stack is not None, "a prompt that is being read has a cache"
        stack.settle()
        stack.close_gaps(0)
        stack.reading = True

    def _needs_behind(self, read: list[RequestState]) -> list[Pages]:
        """For each prompt that was read, the pages that the plans of those after it may take."""
        needs: list[Pages] = [{}]
        for live in reversed(read[1:]):
            needs.append(together(needs[-1], self._sharing.pages_to_settle(live)))
        return needs[::-1] if read else []

    def _settle(self, live: RequestState, later: Pages) -> None:
        """The prompt is read and the first tokens are chosen: plan evictions, and decode with the others.

        later: pages that others may take in this step.
        """
        stack, going = live.stack, live.unfinished
        assert stack is not None, "a prompt that was read has a cache"
        if live.times.first_token is None:
            live.times = replace(live.times, first_token=time.monotonic())
        with live.own_work():
            self._sharing.keep(live, later)
            if going or self._sessions is not None:
                stack.settle()
                for error in stack.take_lost().values():
                    raise error
            self._trunks.planned(live)
        with live.own_work():
            (figures,) = figures_of(stack, live.group.recipe, self._model.layers)
            for answer in live.answers:
                answer.count(figures)
            note_forgotten(live)
        going = live.unfinished
        if going:
            stack.select([0] * len(going))
            live.group = live.group.with_room(len(going))
            live.group.join(stack, going)
            live.stack = None


def _within_reach(live: RequestState, n: int) -> int:
    """Of `n` tokens of a prompt that are to be read, those before the end of the context."""
    reach = live.group.recipe.reach
    return n if reach is None else min(n, reach - live.place)


def names_of(groups: Sequence[DecodeGroup], reading: Sequence[tuple[RequestState, int]]) -> tuple[str, ...]:
    """The requests of a pass by name, common prefixes of a batch left out."""
    decoding = (answer.key[0] for group in groups for answer in group.answers)
    return tuple(dict.fromkeys([*decoding, *(live.request.request_id for live, _ in reading if live.answers)]))
