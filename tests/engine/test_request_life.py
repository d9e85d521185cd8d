"""The engine as a state machine: requests of several methods come and go, and pages run short."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from millpond.engine.engine import Engine
from tests.helpers.engine.helpers import alone, engine_for, prompt
from tests.helpers.engine.life import LIMIT, EngineLife
from tests.helpers.examples import examples

LENGTHS = (20, 31, 40, 57)


class Life(EngineLife):
    texts = tuple(prompt(length) for length in LENGTHS)
    methods = ("full", "h2o", "streaming", "d2o", "ems")
    most = 14

    def make(self) -> Engine:
        return engine_for("h2o", kv_memory=LIMIT, overcommit=3)

    def alone(self, method: str, text: int) -> list[int]:
        return alone(method, LENGTHS[text])

    def ended(self) -> None:
        assert self.engine.stats().kv_reserved == 0, "pages stay behind the last request"


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=examples(6), stateful_step_count=14, suppress_health_check=[HealthCheck.too_slow]
)
