"""A base for engines as state machines: requests come, run, are cancelled, and say what their cache alone would."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import CacheOptions, Request
from tests.helpers.engine.helpers import add, budget_of, greedy, tokens

LIMIT = 60_000


class EngineLife(RuleBasedStateMachine):
    """Every page has its holder and the limit is kept behind each step; each request ends, with its own tokens.

    Attributes:
        texts: prompts that may come. methods: that they may ask for. most: tokens of an answer, at most.
    """

    texts: Sequence[tuple[int, ...]]
    methods: Sequence[str]
    most: int

    def __init__(self) -> None:
        super().__init__()
        self.engine = self.make()
        self.asked: dict[str, tuple[str, int]] = {}
        self.going: set[str] = set()

    def make(self) -> Engine:
        raise NotImplementedError

    def alone(self, method: str, text: int) -> list[int]:
        """What `generate` answers to a text by itself."""
        raise NotImplementedError

    def ended(self) -> None:
        """What holds behind the last request, before the engine is closed."""

    @rule(data=st.data(), n=st.integers(1, 2), priority=st.integers(0, 1))
    def come(self, data: st.DataObject, n: int, priority: int) -> None:
        text = data.draw(st.integers(0, len(self.texts) - 1), "text")
        method = data.draw(st.sampled_from(self.methods), "method")
        params = greedy(data.draw(st.integers(1, self.most), "tokens"), n=n)
        name, cache = str(len(self.asked)), CacheOptions(method=method, budget=budget_of(method))
        add(
            self.engine,
            Request(request_id=name, prompt=self.texts[text], params=params, cache=cache, priority=priority),
        )
        self.asked[name] = method, text
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
        expected = self.alone(*self.asked[output.request_id])
        for index in range(len(output.completions)):
            found = tokens(output, index)
            assert found == expected[: len(found)]
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
        assert self.engine.stats().swapped == 0
        self.ended()
        self.engine.close()
        assert self.engine.stats().kv_reserved == 0
