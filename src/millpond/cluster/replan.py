"""Replanning: the load of a split cluster, and the roles of its workers that balance both phases of it.

Source: DistServe, arXiv:2401.09670, section 4.3 (replanning). The paper runs its search over placements again and loads
the weights anew; here the phases are balanced by the seconds that their workers took, and one worker changes at a time.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from millpond.cluster.messages import WorkerReport
from millpond.engine.cluster_figures import Role
from millpond.errors import MillpondError

#: Share by which a mean length may change before the load counts as another one.
SHIFT = 0.2
#: Newest requests whose lengths count, and the fewest that say something.
NEWEST, LEAST = 64, 16
#: A role changes only where the busier phase then has less than this share of the seconds that it has now.
WORTH = 0.9

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Mean tokens of prompts and of answers."""

    prompt: float
    output: float

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int]]) -> LoadShape:
        """Return that of (prompt, output) tokens of at least one request."""
        prompts, outputs = zip(*lengths, strict=True)
        return cls(statistics.fmean(prompts), statistics.fmean(outputs))

    def shift(self, newer: LoadShape) -> str | None:
        """Return a sentence on how a newer load differs; None where it is alike.

        >>> LoadShape(1000, 100).shift(LoadShape(1100, 150))
        'The mean answer went from 100 to 150 tokens.'
        """
        changes = [
            f"the mean {name} went from {old:,.0f} to {new:,.0f} tokens"
            for name, old, new in (("prompt", self.prompt, newer.prompt), ("answer", self.output, newer.output))
            if abs(new - old) > SHIFT * old
        ]
        text = " and ".join(changes)
        return f"{text[0].upper()}{text[1:]}." if text else None


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Worker-seconds that one request takes in each phase."""

    prefill: float
    decode: float

    def readers(self, workers: int, now: int) -> int:
        """Return how many of the workers should read prompts.

        At least one does, and at least one decodes.
        The busier phase decides on the rate of requests: its seconds over its workers are the least possible. A split
        that is not clearly better than that of `now` readers is not worth the restarts.

        Example:
            >>> PhaseSeconds(1.0, 3.0).readers(4, now=2), PhaseSeconds(1.0, 1.1).readers(4, now=2)
            (1, 2)
        """

        def busier(readers: int) -> float:
            return max(self.prefill / readers, self.decode / (workers - readers))

        best = min(range(1, workers), key=lambda readers: (busier(readers), abs(readers - now)))
        return best if busier(best) < WORTH * busier(now) else now


class LoadWatch:
    """Lengths of the newest requests, and the seconds that their tokens took in each phase."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int]] = deque(maxlen=NEWEST)
        self._planned: LoadShape | None = None
        self._seen: dict[str, tuple[float, int]] = {}  # of each worker, at its last report: busy seconds, tokens
        self._took: dict[Role, list[float]] = {}  # seconds and tokens since a shift was noticed
        self._settles = False  # whether one was, and is not planned for yet

    def finished(self, prompt: int, output: int) -> None:
        """Count a request that has ended, with its tokens."""
        if prompt and output:
            self._lengths.append((prompt, output))

    def reported(self, worker: str, role: Role, report: WorkerReport) -> None:
        """Count what a worker has done since its last report."""
        stats = report.stats
        tokens = stats.prompt_tokens if role == "prefill" else stats.generated_tokens
        busy_s, before = self._seen.get(worker, (0.0, 0))
        self._seen[worker] = report.busy_s, tokens
        took = self._took.setdefault(role, [0.0, 0.0])
        took[0] += report.busy_s - busy_s
        took[1] += tokens - before

    def keep_workers(self, names: Iterable[str]) -> None:
        """Forget all workers but these."""
        kept = set(names)
        self._seen = {name: seen for name, seen in self._seen.items() if name in kept}

    def shifted(self) -> tuple[str, PhaseSeconds] | None:
        """Return how the load differs from the planned one, and the seconds of a request.

        The first load that is seen is the one for which the roles were chosen. When a shift is noticed, lengths and
        seconds are counted anew, so that those of `LEAST` requests of the new load alone decide.

        Returns:
            A sentence and the seconds; None: too few requests or tokens to tell, or a load that is alike.
        """
        if len(self._lengths) < LEAST:
            return None
        newest = LoadShape.of(self._lengths)
        self._planned = self._planned or newest
        change = self._planned.shift(newest)
        if change is None or not self._settles:
            self._settles = change is not None
            if self._settles:
                self._lengths.clear()
                self._took.clear()
            return None
        took = [self._took.get(role, [0.0, 0.0]) for role in ("prefill", "decode")]
        if not all(seconds > 0 and tokens > 0 for seconds, tokens in took):
            return None
        (read_s, read), (decode_s, decoded) = took
        self._planned, self._settles = newest, False
        return change, PhaseSeconds(newest.prompt * read_s / read, newest.output * decode_s / decoded)


class Replanner:
    """Changes roles of workers, one after another, where the load has another shape.

    Args:
        every_s: Seconds between two looks at the load.
        able: Returns the names of the workers that take new requests, by role.
        change: Gives a worker another role: a drain and a restart.
    """

    def __init__(
        self,
        every_s: float,
        able: Callable[[], Mapping[Role, Sequence[str]]],
        change: Callable[[str, Role], Awaitable[object]],
    ) -> None:
        self.load = LoadWatch()
        self._every_s, self._able, self._change = every_s, able, change

    async def run(self) -> None:
        """Look at the load again and again; it ends by being cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            found = self.load.shifted()
            if found is not None:
                await self._balance(*found)

    async def _balance(self, change: str, seconds: PhaseSeconds) -> None:
        while True:
            able = self._able()
            readers, decoders = able["prefill"], able["decode"]
            if not readers or not decoders:
                return
            wanted = seconds.readers(len(readers) + len(decoders), len(readers))
            if wanted == len(readers):
                return
            name, role = (decoders[-1], "prefill") if wanted > len(readers) else (readers[-1], "decode")
            _log.info("%s Worker %s becomes a %s worker.", change, name, role)
            try:
                await self._change(name, role)  # type: ignore[arg-type]
            except MillpondError as error:  # it was lost or drained meanwhile, or no other one starts
                _log.warning("worker %s could not become a %s worker: %s", name, role, error)
                return
