"""Isolation of the request at fault after a pass that failed for several, so that the others continue.

Such a pass leaves some layers with its tokens and others without. So the caches of all its requests are dropped, their
prompts are read again, and then the tokens that they have; they share passes until they reach the failed one. There
each takes its next pass alone: one that fails again has failed, and one that does not is free of suspicion.

Where a device ran out of memory, pages get less of it until these requests have ended, so that fewer run together and
others wait.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from millpond.cache.pages.tier_limits import TierLimits
from millpond.engine.components import Components
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.device_memory import spare_bytes
from millpond.engine.request_state import Incident, RequestState, Suspicion
from millpond.engine.scheduler import Step
from millpond.engine.scheduler_request import RequestStatus
from millpond.errors import PoolFullError

_log = logging.getLogger(__name__)


class FaultIsolation:
    """Restarts the requests of a failed pass, and lets them run alone where they must.

    Args:
        parts: Parts of the engine.

    Attributes:
        n_restarted: How often a request had to begin again.
        fatal: Whether each of several requests has failed alone.
    """

    def __init__(self, parts: Components) -> None:
        self._scheduler, self._requests, self._shared_prefixes = parts.scheduler, parts.requests, parts.shared_prefixes
        self._file_loads, self._layers, self._parts = parts.file_loads, parts.model.layers, parts
        self._last_was_alone = False  # the last pass was one of a request that takes part in no pass of others
        self._full_limit: int | None = None  # of pages, while they have less since a device ran out of memory
        self._until_ended: set[RequestState] = set()  # the requests of that time
        self.n_restarted = 0
        self.fatal = False

    # ------------------------------------------------------------------ before a pass

    def isolate(self, step: Step) -> RequestState | None:
        """Let a request that must run alone do so in this step.

        Returns:
            A request that is free of suspicion if it passes, or None.
        """
        if self._full_limit is not None:
            self._restore_limit()
        parts = [*((scheduled, 1) for scheduled in step.decodes), *step.prefills]
        suspects = [
            (state, n) for scheduled, n in parts if (state := self._requests[scheduled.key]).suspicion is not None
        ]
        due = next((state for state, n in suspects if self._is_due(state, n) and not self._stays_alone(state)), None)
        alone = [state for state, _ in suspects if self._stays_alone(state)]
        if due is None and alone and not (self._last_was_alone and len(alone) < len(parts)):
            self._last_was_alone = True
            self._scheduler.keep_only(step, {alone[0].scheduled})
            return alone[0] if self._is_due(alone[0], dict(parts)[alone[0].scheduled]) else None
        self._last_was_alone = False
        if due is not None:
            self._scheduler.keep_only(step, {due.scheduled})
        elif alone:
            self._scheduler.keep_only(
                step, {scheduled for scheduled, _ in parts} - {state.scheduled for state in alone}
            )
        return due

    @staticmethod
    def _stays_alone(state: RequestState) -> bool:
        return state.suspicion is not None and state.suspicion.alone

    @staticmethod
    def _is_due(state: RequestState, n: int) -> bool:
        """Return whether a request repeats its part of the failed pass.

        That part is `n` tokens of its prompt, or its answers.
        """
        suspicion = state.suspicion
        assert suspicion is not None, "a suspect"
        if state.scheduled.status is RequestStatus.DECODE:
            return not state.replaying
        return not suspicion.decoding and state.scheduled.num_computed_tokens + n > suspicion.read

    def is_free(
        self, state: RequestState | None, groups: Sequence[DecodeGroup], reading: Mapping[RequestState, int]
    ) -> bool:
        """Return whether a request that `isolate` returned still gets the pass that it needs."""
        if (
            state is None
            or state.failed
            or not (state in reading or (state.private_cache is None and state.group in groups))
        ):
            return False
        return self._is_due(state, reading.get(state, 1))

    # ------------------------------------------------------------------ behind a pass

    def passed(self, state: RequestState) -> None:
        """Clear a request that has passed alone: it decodes with the others again."""
        suspicion, state.suspicion = state.suspicion, None
        if suspicion is None:
            return
        suspicion.incident.passed += 1
        suspicion.incident.suspects.discard(state)
        home = suspicion.home if suspicion.home.is_skippable == state.scheduled.is_skippable else suspicion.home.other
        unfinished = state.unfinished
        if state.private_cache is None and unfinished and unfinished[0] in state.group.completions:
            parted_cache = state.group.part(unfinished)
            state.group = home.with_room(len(unfinished))
            state.group.join(parted_cache, unfinished)
        else:
            state.group = home

    def failed(
        self, groups: Sequence[DecodeGroup], reading: Collection[RequestState], error: Exception
    ) -> list[RequestState]:
        """Restart the requests of a failed pass, or end the only one; return the ended ones."""
        if not isinstance(error, torch.OutOfMemoryError):
            return self._failed(groups, reading, error)
        held = self._parts.memory.nbytes
        full = PoolFullError(
            f"the device ran out of memory in a pass that ran for this request alone, with {held:,} bytes in pages "
            f"({str(error).splitlines()[0]}); lower max_step_tokens or kv_memory, or shorten the request"
        )
        full.__cause__ = error
        ended = self._failed(groups, reading, full)
        self._lower_limit(held)
        return ended

    def _lower_limit(self, held: int) -> None:
        """Let pages take less than the bytes that they held when a device ran out of memory."""
        memory = self._parts.memory
        self._parts.trim()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if isinstance(memory, TierLimits) or memory.limit_bytes is None:
            return  # what lies on a device has no limit of its own there
        self._full_limit = memory.limit_bytes if self._full_limit is None else self._full_limit
        self._until_ended = set(self._requests)
        memory.limit_bytes = min(memory.limit_bytes, max(held - spare_bytes(held), memory.nbytes))
        _log.warning(
            "the device ran out of memory with %s bytes in pages: they get %s until these requests have ended, and "
            "requests wait that do not fit",
            f"{held:,}",
            f"{memory.limit_bytes:,}",
        )

    def _restore_limit(self) -> None:
        """Give pages all of their memory again.

        Not before the requests have ended with which a device ran out of it.
        """
        if any(self._requests.get(state.request.request_id) is state for state in self._until_ended):
            return
        self._parts.memory.limit_bytes, self._full_limit, self._until_ended = self._full_limit, None, set()

    def _failed(
        self, groups: Sequence[DecodeGroup], reading: Collection[RequestState], error: Exception
    ) -> list[RequestState]:
        touched = {
            *groups,
            *(state.group for state in reading if state.private_cache is None and state.scheduled.num_computed_tokens),
        }
        states = self._of(touched, reading)
        for group in touched:
            group.clear()
        shared_prefixes = [state for state in states if not state.completions]
        for shared_prefix in shared_prefixes:
            self._shared_prefixes.release(shared_prefix)
        states = [state for state in states if state.completions]
        unfinished = [state for state in states if state.unfinished]
        if len(unfinished) == len(states) == 1 and not shared_prefixes:
            unfinished[0].fail(error)
            self.fatal = self._all_failed(unfinished[0])
        elif unfinished:
            incident = Incident(set(unfinished))
            for state in unfinished:
                home, alone = state.group, not state.advanced()
                if state.suspicion is not None:
                    home, alone = state.suspicion.home, True
                    state.suspicion.incident.suspects.discard(state)
                state.suspicion = Suspicion(
                    incident, state.scheduled.num_computed_tokens, state not in reading, home, alone
                )
                self._restart(state)
        return [state for state in states if not state.unfinished]

    def _of(self, touched: Collection[DecodeGroup], reading: Collection[RequestState]) -> list[RequestState]:
        """Return the requests that have answers in batches, and those that are read."""
        decoding = [
            state
            for state in self._requests
            if state.group in touched
            and state.private_cache is None
            and any(completion in state.group.completions for completion in state.completions)
        ]
        return list(dict.fromkeys([*decoding, *reading]))

    def _restart(self, state: RequestState) -> None:
        """Let a suspect wait again, with nothing in any cache."""
        assert state.suspicion is not None, "a suspect"
        self.n_restarted += 1
        state.group = DecodeGroup(state.suspicion.home.cache_factory, self._layers)
        self._shared_prefixes.detach(state, swapped=True)
        state.begin_again()
        self._scheduler.restart(state.scheduled, len(state.unfinished))
        for loads in self._file_loads:
            loads.forget(state)
            loads.add(state)

    def _all_failed(self, state: RequestState) -> bool:
        """Return whether every request of a failed pass has failed alone since.

        `state` is the last of them, and there were several.
        """
        if state.suspicion is None:
            return False
        incident = state.suspicion.incident
        incident.failed += 1
        incident.suspects.discard(state)
        remaining = [
            suspect for suspect in incident.suspects if self._requests.get(suspect.request.request_id) is suspect
        ]
        return incident.failed > 1 and not incident.passed and not remaining
