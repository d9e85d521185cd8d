"""Trunks of a planned batch: common beginnings of prompts that are read as jobs of their own, and held for them.

A trunk is a cache whose prompt was not planned. A request behind it begins with a copy of that state: its pages are
shared until one of the two writes, and what a method sums over queries (column sums, moments, the queries themselves)
goes on from there. So a beginning may end inside a page, which is then copied, and is exact for methods that sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.engine.batch_plan import BatchPlan, plan_batch
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.memory_estimate import estimate_behind, estimate_trunk, keeps_pages, shares_pages
from millpond.engine.outputs import Times
from millpond.engine.request import Request
from millpond.engine.request_state import RequestState
from millpond.engine.request_table import RequestTable
from millpond.engine.scheduler import Job, Scheduler, State
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import LayerShape


class Trunks:
    """Adds trunks, lets requests begin with them, and lets them go when nothing needs them any more.

    Args:
        requests: the engine's, trunks among them. layers: what each layer of the model stores.
    """

    def __init__(
        self, account: MemoryLimit, scheduler: Scheduler, requests: RequestTable, layers: list[LayerShape]
    ) -> None:
        self._account, self._scheduler, self._requests, self._layers = account, scheduler, requests, layers
        self._names = count()

    def plan(self, lives: Sequence[RequestState], levels: int | None) -> BatchPlan:
        """The plan of requests of one kind; see `plan_batch`."""
        recipe = lives[0].group.recipe if lives else None
        if recipe is None or not can_begin(recipe):
            levels = 0
        answers = [float(sum(answer.most for answer in live.answers)) for live in lives]
        plan = plan_batch([live.numbers for live in lives], answers, levels=levels)
        if recipe is None:
            return plan
        return replace(plan, pinned_bytes=estimate_trunk(recipe, self._layers, plan.most_pinned, 0).reading)

    def add_planned(
        self, lives: Sequence[RequestState], levels: int | None, take_in: Callable[[RequestState], None]
    ) -> None:
        """Trunks and requests join the queue in the order of their plan.

        Args:
            levels: see `plan_batch`. take_in: adds a request.
        """
        kinds: dict[Hashable, list[RequestState]] = {}
        for live in lives:
            kinds.setdefault((live.group, live.request.cache_salt), []).append(live)
        for alike in kinds.values():
            plan = self.plan(alike, levels)
            added: dict[int, RequestState | None] = {-1: None}
            for reading in plan.readings:
                if reading.prompt is None:
                    of = plan.trunks[reading.trunk]
                    above = added[of.parent]
                    found = self._add(alike[of.prompt].numbers[: of.length], alike[of.prompt].group, above)
                    added[reading.trunk] = found or above
                else:
                    self._choose(alike[reading.prompt], added[reading.trunk])
                    take_in(alike[reading.prompt])
            self._end_unused([trunk for trunk in added.values() if trunk is not None])

    def _add(self, ids: np.ndarray, group: DecodeGroup, parent: RequestState | None) -> RequestState | None:
        """A trunk joins the queue; None: prompts of this method begin with none, or it does not fit.

        Args:
            ids: (n,) its tokens. group: of the requests behind it. parent: the trunk that it continues.
        """
        if group.recipe.within_context(len(ids)) != len(ids) or len(ids) == group.recipe.reach:
            return None  # gaps close before its end
        alone = estimate_trunk(group.recipe, self._layers, len(ids), 0)
        if not can_begin(group.recipe) or not self._fits_behind(None, alone.reading):
            return None
        name = next(name for number in self._names if (name := f"trunk {number}") not in self._requests)
        tokens = tuple(ids.tolist())
        job = Job(name, len(tokens), alone, width=0, trunk=True)
        trunk = RequestState(Request(request_id=name, prompt=tokens), tokens, job, group, [], Times(0.0))
        if parent is not None:
            behind = estimate_trunk(group.recipe, self._layers, len(tokens), len(parent.ids))
            if self._fits_behind(parent, behind.reading):
                self._follow(trunk, parent)
                job.need = behind
        self._requests.add(trunk)
        self._scheduler.add(job)
        return trunk

    def _choose(self, live: RequestState, trunk: RequestState | None) -> None:
        """Let a request begin with a trunk, or with the nearest before it with which it fits; or with none.

        A request whose prompt's log probabilities are wanted reads all of it, as does one of which spans
        leave; one with chunks takes them from a store.
        """
        if live.prompt_logprobs is not None or live.spans or live.marks.forget:
            return
        while trunk is not None:
            need = estimate_behind(
                live.group.recipe, self._layers, live.whole_need, len(live.ids), live.job.width, len(trunk.ids)
            )
            if self._fits_behind(trunk, need.most(live.job.width)):
                self._follow(live, trunk)
                live.job.need = need
                return
            trunk = trunk.trunk

    def attach(self, live: RequestState) -> int:
        """See `PromptSource`: a request that begins, or a trunk, holds what its trunk holds."""
        trunk = live.trunk
        if trunk is None or trunk.stack is None:
            return 0
        live.stack = live.group.recipe.stack(len(live.ids))
        trunk.stack.copy_to([0], live.stack)
        if not shares_pages(live.group.recipe):
            self.leave(live)
        return len(trunk.ids)

    def planned(self, live: RequestState) -> None:
        """The prompt of a request was planned: unless its pages stay, those of its trunk are not needed any more."""
        if live.trunk is not None and not keeps_pages(live.group.recipe, self._layers):
            self.leave(live)

    def leave(self, live: RequestState, *, swapped: bool = False) -> None:
        """A request needs its trunk no more; one that nothing needs is let go.

        swapped: it had to leave the pool, and comes back with pages of its own.
        """
        trunk = live.trunk
        if swapped and trunk is not None:
            live.job.need = live.whole_need
        while trunk is not None:
            live.trunk = live.job.after = None
            trunk.users.discard(live)
            if trunk.users:
                return
            self._end(trunk)
            live, trunk = trunk, trunk.trunk

    def let_go(self, trunk: RequestState) -> None:
        """Give up a trunk: what has not begun with it runs as if there were none. One that is gone is no error."""
        if self._requests.get(trunk.request.request_id) is not trunk:
            return
        for live in list(trunk.users):
            live.trunk = live.job.after = None
            if live.stack is None:
                live.job.need = live.whole_need
        trunk.users.clear()
        self._end(trunk)
        self.leave(trunk)

    def let_one_go(self) -> bool:
        """Give up the newest trunk whose pages no other holds; False: there is none."""
        held = self._requests.with_status(State.HELD)
        idle = [trunk for trunk in held if all(user.stack is None for user in trunk.users)]
        if not idle:
            return False
        self.let_go(max(idle, key=lambda trunk: trunk.job.arrival))
        return True

    def _end_unused(self, added: list[RequestState]) -> None:
        """Release those among new trunks that nothing begins with."""
        for trunk in reversed(added):  # children come after their parents
            if not trunk.users:
                self.let_go(trunk)

    def _follow(self, live: RequestState, trunk: RequestState) -> None:
        live.trunk, live.job.after = trunk, trunk.job
        trunk.users.add(live)

    def _fits_behind(self, trunk: RequestState | None, n_bytes: int) -> bool:
        """Whether `n_bytes` fit together with a trunk and all those that it continues."""
        limit = self._account.limit_bytes
        while trunk is not None:
            n_bytes += trunk.job.need.reading
            trunk = trunk.trunk
        return limit is None or n_bytes <= limit

    def _end(self, trunk: RequestState) -> None:
        trunk.job.state = State.DROPPED
        if trunk.stack is not None:
            trunk.stack.clear()
            trunk.stack = None
        self._scheduler.remove(trunk.job)
        self._requests.remove(trunk)


def can_begin(recipe: CacheFactory) -> bool:
    """Whether a prompt can begin with a copy of the state behind its beginning.

    It cannot where entries leave before the prompt was read, where keys turn with evictions, where a prompt must be
    read in one pass, where KV lies on a disk, and in hybrids with recurrent states.
    """
    policy = recipe.policy
    read_whole = policy.prefill == "once" and policy.positions == "absolute" and not recipe.whole_prompt
    return read_whole and recipe.slots is None and recipe.tier is None
