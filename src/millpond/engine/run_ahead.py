"""Decoding steps that are launched before the tokens of the step before them are read.

A model on a GPU would wait for the host at every step: the host sees the tokens first and launches the next pass then.
So where the next step is a plain decoding step, its pass is launched with the tokens where they are, on the device.
Only then are the tokens of the step before read, while the device works, and the host appends them and looks for ends.
Between two calls of `Engine.step` one step is pending: the caches hold its entries, and no answer has its tokens.

* A step follows the pending one if it only decodes: nothing is read, preempted, resumed or released, all of its
  answers are in the step before it, none of them reaches `max_tokens` there, and its pages are free. Before all else,
  and before anything besides a step looks at a cache, the pending step is read.
* Answers that need the host between two tokens never take part: those with a grammar, with forbidden tokens or with
  known ones, those whose cache is looked at when they end (`watch`, reports of what was forgotten), and suspects of a
  failed pass. An engine that stores finished turns runs no step ahead at all.
* An answer that turns out to have ended has a row in the next step, which is dropped with its cache; so has one that
  was cancelled. Figures are those that the caches had when the answer got its token.
"""

from __future__ import annotations

from collections.abc import Callable

from millpond.engine.completion import CompletionState
from millpond.engine.components import Components
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.request_state import RequestState
from millpond.engine.scheduler import Step
from millpond.engine.scheduler_request import SchedulerRequest
from millpond.engine.step_executor import LaunchedStep, StepExecutor


class RunAhead:
    """The decoding step that is pending, and when another is launched behind it.

    Args:
        parts: Parts of the engine.
        executor: Launches steps and reads their tokens.
        has_room: Whether a step finds its pages without preemption.
        enabled: Whether steps are launched ahead at all.

    Attributes:
        n_followed: Steps that were launched before the one before them was read.
    """

    def __init__(
        self, parts: Components, executor: StepExecutor, has_room: Callable[[Step], bool], *, enabled: bool
    ) -> None:
        self._requests, self._scheduler, self._sampler = parts.requests, parts.scheduler, parts.sampler
        self._executor, self._has_room = executor, has_room
        self._enabled = enabled and parts.sessions is None and parts.disk_tier is None
        self._pending: LaunchedStep | None = None
        self.n_followed = 0

    def takes(self, step: Step) -> bool:
        """Return whether the tokens of a step may be read after the next one was launched."""
        return self._enabled and _only_decodes(step) and all(map(self._may_run_ahead, step.decodes))

    def follows(self, step: Step) -> bool:
        """Return whether a step may be launched before the pending one is read."""
        if self._pending is None or not self.takes(step):
            return False
        there = self._pending.completions
        answers = [completion for scheduled in step.decodes for completion in self._answers(scheduled)]
        is_next = all(answer in there and len(answer.tokens) + 1 < answer.max_new_tokens for answer in answers)
        return is_next and self._has_room(step)

    def launch(self, groups: list[DecodeGroup], step: Step) -> list[RequestState]:
        """Launch a step that `takes`, then read the pending one.

        Returns:
            Requests with new tokens, or that failed.

        Raises:
            Exception: the pass failed, see `StepExecutor.run`; the pending step is still there.
        """
        launched = self._executor.launch(groups, self._pending)
        self.n_followed += self._pending is not None
        advanced = self.settle(step)
        self._pending = launched
        return [*launched.choices.failed, *advanced]

    def settle(self, step: Step | None = None) -> list[RequestState]:
        """Read the pending step, if there is one.

        Args:
            step: Step that was planned behind it, whose rows of ended answers do not count; None: none was.

        Returns:
            Requests with new tokens; the caller retires what has ended.
        """
        before, self._pending = self._pending, None
        return [] if before is None else self._read(before, step)

    def drop(self) -> None:
        """Forget the pending step."""
        self._pending = None

    def _read(self, before: LaunchedStep, step: Step | None) -> list[RequestState]:
        open_answers = [completion for completion in before.completions if not completion.finished]
        owners = [self._requests.owner(completion) for completion in open_answers]
        advanced = self._executor.settle(before)
        planned = () if step is None else step.decodes
        for completion, owner in zip(open_answers, owners, strict=True):
            if completion.finished and owner.scheduled in planned:
                self._scheduler.take_back(owner.scheduled)
        return advanced

    def _answers(self, scheduled: SchedulerRequest) -> list[CompletionState]:
        return self._requests[scheduled.key].unfinished

    def _may_run_ahead(self, scheduled: SchedulerRequest) -> bool:
        """Return whether an answer's next pass needs nothing of its newest token but its id."""
        if not scheduled.is_running:  # preempted since the step was planned, or lost as it was
            return False
        state = self._requests[scheduled.key]
        is_plain = state.private_cache is None and state.suspicion is None and not state.replaying
        looks_back = state.request.watch or bool(state.marks.report)
        return (
            is_plain
            and not looks_back
            and not any(self._sampler.needs_host(completion.key) for completion in state.unfinished)
        )


def _only_decodes(step: Step) -> bool:
    besides = step.release or step.preempt or step.resume or step.prefills
    return bool(step.decodes) and not besides and step.runs_throttled is None
