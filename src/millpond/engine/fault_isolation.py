"""Search for the request at fault behind a pass that failed for several, so that the others go on.

Such a pass leaves some layers with its tokens and others without. So the caches of all its requests are dropped, their
prompts are read again, and then the tokens that they have; they share passes until they come to where they were. There
each takes its next pass alone: one that fails again has failed, and one that does not is free of suspicion.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from millpond.engine.components import Components
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.request_state import Incident, RequestState, Suspicion
from millpond.engine.scheduler import State, Step


class FaultIsolation:
    """Restarts the requests of a failed pass, and lets them run alone where they must.

    Attributes:
        n_restarted: how often a request had to begin again. fatal: each of several requests has failed alone.
    """

    def __init__(self, parts: Components) -> None:
        self._scheduler, self._requests, self._trunks = parts.scheduler, parts.requests, parts.shared_prefixes
        self._loads, self._layers = parts.file_loads, parts.model.layers
        self._of_others = False  # the last pass was one of a request that takes part in none of others
        self.n_restarted = 0
        self.fatal = False

    # ------------------------------------------------------------------ before a pass

    def isolate(self, step: Step) -> RequestState | None:
        """Let a request that must run alone do so in this step; returns one that is free of suspicion if it passes."""
        parts = [*((job, 1) for job in step.decodes), *step.chunks]
        suspects = [(live, n) for job, n in parts if (live := self._requests[job.key]).suspicion is not None]
        due = next((live for live, n in suspects if self._is_due(live, n) and not self._stays_alone(live)), None)
        apart = [live for live, _ in suspects if self._stays_alone(live)]
        if due is None and apart and not (self._of_others and len(apart) < len(parts)):
            self._of_others = True
            self._scheduler.keep_only(step, {apart[0].job})
            return apart[0] if self._is_due(apart[0], dict(parts)[apart[0].job]) else None
        self._of_others = False
        if due is not None:
            self._scheduler.keep_only(step, {due.job})
        elif apart:
            self._scheduler.keep_only(step, {job for job, _ in parts} - {live.job for live in apart})
        return due

    @staticmethod
    def _stays_alone(live: RequestState) -> bool:
        return live.suspicion is not None and live.suspicion.alone

    @staticmethod
    def _is_due(live: RequestState, n: int) -> bool:
        """Whether a part of a request is what it had in the pass that failed: `n` tokens of its prompt, or answers."""
        doubt = live.suspicion
        assert doubt is not None, "a suspect"
        if live.job.state is State.DECODING:
            return not live.replaying
        return not doubt.decoding and live.job.read + n > doubt.read

    def is_free(
        self, live: RequestState | None, groups: Sequence[DecodeGroup], reading: Mapping[RequestState, int]
    ) -> bool:
        """Whether a request that `isolate` returned is about to have the pass that it needs, after all."""
        if live is None or live.failed or not (live in reading or (live.stack is None and live.group in groups)):
            return False
        return self._is_due(live, reading.get(live, 1))

    # ------------------------------------------------------------------ behind a pass

    def passed(self, live: RequestState) -> None:
        """A request had passed alone what it was suspected of: it decodes with the others again."""
        doubt, live.suspicion = live.suspicion, None
        if doubt is None:
            return
        doubt.incident.passed += 1
        doubt.incident.suspects.discard(live)
        home = doubt.home if doubt.home.apart == live.job.apart else doubt.home.other
        going = live.unfinished
        if live.stack is None and going and going[0] in live.group.answers:
            own = live.group.part(going)
            live.group = home.with_room(len(going))
            live.group.join(own, going)
        else:
            live.group = home

    def failed(
        self, groups: Sequence[DecodeGroup], reading: Collection[RequestState], error: Exception
    ) -> list[RequestState]:
        """A pass failed: restart its requests, or end the only one; returns those that have ended."""
        touched = {*groups, *(live.group for live in reading if live.stack is None and live.job.read)}
        lives = self._of(touched, reading)
        for group in touched:
            group.clear()
        trunks = [live for live in lives if not live.answers]
        for trunk in trunks:
            self._trunks.let_go(trunk)
        lives = [live for live in lives if live.answers]
        going = [live for live in lives if live.unfinished]
        if len(going) == 1 and not trunks:
            going[0].fail(error)
            self.fatal = self._all_failed(going[0])
        elif going:
            incident = Incident(set(going))
            for live in going:
                home, alone = live.group, not live.advanced()
                if live.suspicion is not None:
                    home, alone = live.suspicion.home, True
                    live.suspicion.incident.suspects.discard(live)
                live.suspicion = Suspicion(incident, live.job.read, live not in reading, home, alone)
                self._restart(live)
        return [live for live in lives if not live.unfinished]

    def _of(self, touched: Collection[DecodeGroup], reading: Collection[RequestState]) -> list[RequestState]:
        """The requests that have answers in batches, and those that are read."""
        own = [
            live
            for live in self._requests
            if live.group in touched and live.stack is None and any(a in live.group.answers for a in live.answers)
        ]
        return list(dict.fromkeys([*own, *reading]))

    def _restart(self, live: RequestState) -> None:
        """A suspect waits again, with nothing in any cache."""
        assert live.suspicion is not None, "a suspect"
        self.n_restarted += 1
        if live.stack is not None:
            live.stack.clear()
            live.stack = None
        live.group = DecodeGroup(live.suspicion.home.recipe, self._layers)
        self._trunks.leave(live, swapped=True)
        if live.blend is not None:
            live.blend.release()
            live.blend = None
        live.restored, live.restored_exact = 0, True
        live.waited = live.reader_read = 0
        if live.prompt_logprobs is not None:
            live.prompt_logprobs = [None]
        for answer in live.unfinished:
            answer.begin_again()
        self._scheduler.restart(live.job, len(live.unfinished))
        for loads in self._loads:
            loads.forget(live)
            loads.add(live)

    def _all_failed(self, live: RequestState) -> bool:
        """Whether every request of a failed pass has failed alone since, this one the last, and there were several."""
        if live.suspicion is None:
            return False
        incident = live.suspicion.incident
        incident.failed += 1
        incident.suspects.discard(live)
        left = [one for one in incident.suspects if self._requests.get(one.request.request_id) is one]
        return incident.failed > 1 and not incident.passed and not left
