"""The engine with its prefix tree as a state machine: prompts begin alike, pages run short, blocks are let go of."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import millpond as mp
from millpond.cache.prefix import Block
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.engine.scheduler import State
from tests.engine.helpers import add, budget_of, engine_for, greedy, prompt, tokens
from tests.hf.families import generate, shared_model

LIMIT = 60_000
SLOTS = 4
NEW = 8
#: Two that share, also with each other, and one that reads its whole prompt.
METHODS = ["full", "snapkv", "h2o"]
COMMON = prompt(57)[:40]
#: A tree of texts: the first two part late, the third early, the last is a beginning of the others.
TEXTS = [COMMON + prompt(31)[:9], COMMON + prompt(40)[:3], COMMON[:13] + prompt(31)[:20], COMMON[:37]]


@cache
def alone(method: str, text: int) -> list[int]:
    ids = torch.tensor([TEXTS[text]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        with mp.compress(shared_model("llama"), method, budget_of(method)) as kept:
            asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            out = generate(shared_model("llama"), asked, NEW, past_key_values=kept)
    return [int(i) for i in out[0, ids.shape[1] :]]


class SharedLife(RuleBasedStateMachine):
    """Whatever is shared, swapped, cancelled and let go of: each page has its holders, and each answer its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = engine_for("full", kv_memory=LIMIT, overcommit=3, prefix_cache=True, page_slots=SLOTS)
        self.tree = self.engine._sharing.tree
        self.asked: dict[str, tuple[str, int]] = {}
        self.going: set[str] = set()

    @rule(
        text=st.integers(0, len(TEXTS) - 1), method=st.sampled_from(METHODS), n=st.integers(1, 2),
        priority=st.integers(0, 1), new=st.integers(1, NEW),
    )  # fmt: skip
    def come(self, text: int, method: str, n: int, priority: int, new: int) -> None:
        name = str(len(self.asked))
        cache_options = CacheOptions(method=method, budget=budget_of(method))
        add(self.engine, Request(
            request_id=name, prompt=TEXTS[text], params=greedy(new, n=n), cache=cache_options, priority=priority
        ))  # fmt: skip
        self.asked[name] = method, text
        self.going.add(name)

    @rule(times=st.integers(1, 5))
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

    @precondition(lambda self: len(self.tree))
    @rule(n=st.integers(1, 6))
    def let_go(self, n: int) -> None:
        """The longest unused blocks go, whoever reads them still."""
        before = self.blocks()
        stay = max(len(before) - n, 0)
        assert self.tree.evict(lambda: len(self.tree) <= stay)
        assert len(self.tree) == stay
        assert set(map(id, self.blocks())) <= set(map(id, before))

    def blocks(self) -> list[Block]:
        return list(self.tree._blocks.values())

    def look(self, output: RequestOutput) -> None:
        assert output.error is None
        method, text = self.asked[output.request_id]
        for index in range(len(output.completions)):
            found = tokens(output, index)
            assert found == alone(method, text)[: len(found)]
        if output.finished:
            self.going.remove(output.request_id)

    @invariant()
    def pages_have_holders_and_the_limit_is_kept(self) -> None:
        self.engine.check_integrity()
        assert self.engine.stats().kv_reserved <= LIMIT

    @invariant()
    def the_tree_is_one(self) -> None:
        blocks = self.blocks()
        held: dict[int, int] = {}
        pages: set[tuple[Any, ...]] = set()
        for block in blocks:
            assert block.parent is None or block.parent in blocks, "a block went before the ones behind it"
            held[id(block.parent)] = held.get(id(block.parent), 0) + 1
            for pool, ids in zip(block.pools, block.pages, strict=True):
                own = {(id(pool), int(page)) for page in ids}
                assert not own & pages, "a page in two blocks"
                pages |= own
        assert all(block.followers == held.get(id(block), 0) for block in blocks)

    @invariant()
    def what_is_outside_holds_nothing(self) -> None:
        for live in self.engine._live.values():
            if live.job.state is State.SWAPPED:
                assert live.stack is not None
                assert live.stack.carried
                assert not any(len(core.table.held()) for core in live.stack.cores if core.table is not None)

    def teardown(self) -> None:
        steps = 0
        while self.engine.busy:
            self.step(1)
            steps += 1
            assert steps < 3000, "somebody starved"
        assert not self.going
        self.tree.clear()
        assert self.engine.stats().swapped == 0
        self.engine.close()
        assert self.engine.stats().kv_reserved == 0


TestSharedLife = SharedLife.TestCase
TestSharedLife.settings = settings(
    max_examples=8, stateful_step_count=16, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
