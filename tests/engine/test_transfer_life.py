"""Two engines as a state machine: requests come, move, run and are cancelled, and pages run short on both sides."""

from __future__ import annotations

import warnings

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from millpond.engine.engine import Engine
from millpond.errors import PoolFullError
from tests.helpers.engine.helpers import alone, engine_for, prompt
from tests.helpers.engine.life import LIMIT, EngineLife
from tests.helpers.examples import examples

LENGTHS = (20, 31, 40, 57)


class TwoEngines(EngineLife):
    texts = tuple(prompt(length) for length in LENGTHS)
    methods = ("full", "h2o", "streaming", "d2o", "ada")
    most = 14

    def __init__(self) -> None:
        self.between: dict[str, bytes] = {}
        super().__init__()
        self.second = engine_for("h2o", kv_memory=LIMIT, overcommit=3, page_slots=8)

    def make(self) -> Engine:
        return engine_for("h2o", kv_memory=LIMIT, overcommit=3)

    def alone(self, method: str, text: int) -> list[int]:
        return alone(method, LENGTHS[text])

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.engine, self.second

    @precondition(lambda self: self.going)
    @rule(which=st.integers(0, 100), arrives=st.booleans())
    def move(self, which: int, arrives: bool) -> None:
        """Out of the engine that has it; into the other one at once, or later."""
        name = sorted(self.going)[which % len(self.going)]
        for engine, other in (self.engines, self.engines[::-1]):
            if name in engine._requests:
                try:
                    self.between[name] = engine.export_request(name)
                except PoolFullError:
                    return
                assert name not in engine._requests
                if arrives:
                    self.land(name, other)
                return

    def land(self, name: str, engine: Engine) -> None:
        live, waiting = len(engine._sampler), len(engine._scheduler)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=UserWarning)
            try:
                engine.import_request(self.between[name])
            except PoolFullError:
                assert (len(engine._sampler), len(engine._scheduler)) == (live, waiting)
                return
        del self.between[name]

    @rule(times=st.integers(1, 6))
    def step_second(self, times: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=UserWarning)
            for _ in range(times):
                for output in self.second.step():
                    self.look(output)
        for name in list(self.between):
            self.land(name, self.second)

    @precondition(lambda self: self.going)
    @rule(which=st.integers(0, 100))
    def cancel_second(self, which: int) -> None:
        self.second.cancel(sorted(self.going)[which % len(self.going)])

    @invariant()
    def pages_of_the_second_have_holders(self) -> None:
        self.second.check_integrity()
        assert self.second.stats().kv_reserved <= LIMIT

    def teardown(self) -> None:
        steps = 0
        while self.second.busy or self.between or self.engine.busy:
            self.step_second(1)
            self.step(1)
            steps += 1
            assert steps < 3000, "a request starved"
        assert len(self.second._sampler) == 0
        assert self.second.stats().kv_reserved == 0
        self.second.close()
        super().teardown()

    def ended(self) -> None:
        assert self.engine.stats().kv_reserved == 0, "pages stay behind the last request"


TestTwoEngines = TwoEngines.TestCase
TestTwoEngines.settings = settings(
    max_examples=examples(3), stateful_step_count=16, suppress_health_check=[HealthCheck.too_slow]
)
