"""The engine as a state machine: requests of several methods come and go, and pages run short."""

from __future__ import annotations

import warnings

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.engine.outputs import RequestOutput
from millpond.engine.request import CacheOptions, Request
from tests.engine.helpers import add, alone, budget_of, engine_for, greedy, prompt, tokens

LIMIT = 60_000
METHODS = ["full", "h2o", "streaming", "d2o", "ems"]


class Life(RuleBasedStateMachine):
    """Every page has its holder and the limit is kept behind each step; each request ends, with its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = engine_for("h2o", kv_memory=LIMIT, overcommit=3)
        self.asked: dict[str, tuple[str, int]] = {}
        self.going: set[str] = set()
        self.number = 0

    @rule(
        length=st.sampled_from([20, 31, 40, 57]), method=st.sampled_from(METHODS), n=st.integers(1, 2),
        priority=st.integers(0, 1), new=st.integers(1, 14),
    )  # fmt: skip
    def come(self, length: int, method: str, n: int, priority: int, new: int) -> None:
        name = f"{self.number}"
        self.number += 1
        cache = CacheOptions(method=method, budget=budget_of(method))
        add(self.engine, Request(
            request_id=name, prompt=prompt(length), params=greedy(new, n=n), cache=cache, priority=priority
        ))  # fmt: skip
        self.asked[name] = method, length
        self.going.add(name)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=UserWarning)
            for _ in range(times):
                for output in self.engine.step():
                    self.look(output)

    @precondition(lambda self: self.going)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        self.engine.cancel(sorted(self.going)[which % len(self.going)])

    def look(self, output: RequestOutput) -> None:
        assert output.error is None
        method, length = self.asked[output.request_id]
        for index in range(len(output.completions)):
            found = tokens(output, index)
            assert found == alone(method, length)[: len(found)]
        if output.finished:
            self.going.remove(output.request_id)

    @invariant()
    def pages_have_holders_and_the_limit_is_kept(self) -> None:
        self.engine.check_integrity()
        assert self.engine.stats().kv_reserved <= LIMIT

    def teardown(self) -> None:
        steps = 0
        while self.engine.busy:
            self.step(1)
            steps += 1
            assert steps < 3000, "somebody starved"
        assert not self.going
        assert self.engine.stats().kv_reserved == 0
        self.engine.close()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=6, stateful_step_count=14, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
