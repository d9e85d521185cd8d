"""The engine with its prefix tree as a state machine: prompts begin alike, pages run short, blocks are let go of."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

import millpond as mp
from millpond.cache.prefix_node import PrefixNode
from millpond.engine.engine import Engine
from millpond.engine.scheduler_request import RequestStatus
from tests.helpers.engine.helpers import budget_of, engine_for, prompt
from tests.helpers.engine.life import LIMIT, EngineLife
from tests.helpers.examples import examples
from tests.helpers.hf.families import generate, shared_model

SLOTS = 4
NEW = 8
COMMON = prompt(57)[:40]
#: A tree of texts: the first two part late, the third early, the last is a beginning of the others.
TEXTS = (COMMON + prompt(31)[:9], COMMON + prompt(40)[:3], COMMON[:13] + prompt(31)[:20], COMMON[:37])


@cache
def alone(method: str, text: int) -> list[int]:
    ids = torch.tensor([TEXTS[text]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        with mp.compress(shared_model("llama"), method, budget_of(method)) as kept:
            asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            out = generate(shared_model("llama"), asked, NEW, cache=kept)
    return [int(i) for i in out[0, ids.shape[1] :]]


class SharedLife(EngineLife):
    """Whatever is shared, swapped, cancelled and let go of: each page has its holders, and each answer its tokens."""

    texts = TEXTS
    methods = ("full", "snapkv", "h2o")  # two that share, also with each other, and one that reads its whole prompt
    most = NEW

    def __init__(self) -> None:
        super().__init__()
        self.tree = self.engine._parts.prefix_cache.tree

    def make(self) -> Engine:
        return engine_for("full", kv_memory=LIMIT, overcommit=3, prefix_cache=True, page_slots=SLOTS)

    def alone(self, method: str, text: int) -> list[int]:
        return alone(method, text)

    @precondition(lambda self: len(self.tree))
    @rule(n=st.integers(1, 6))
    def let_go(self, n: int) -> None:
        """The longest unused blocks go, but for those that requests read still."""
        before = self.blocks()
        stay = max(len(before) - n, 0)
        if not self.tree.evict(lambda: len(self.tree) <= stay):
            assert all(block.n_children or self.read_still(block) for block in self.blocks())
        assert len(self.tree) >= stay
        assert set(map(id, self.blocks())) <= set(map(id, before))

    def read_still(self, block: PrefixNode) -> bool:
        return all((pool.refs(ids) > 1).all() for pool, ids in zip(block.pools, block.pages, strict=True))

    def blocks(self) -> list[PrefixNode]:
        return list(self.tree._blocks.values())

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
        assert all(block.n_children == held.get(id(block), 0) for block in blocks)

    @invariant()
    def what_is_outside_holds_nothing(self) -> None:
        for state in self.engine._requests:
            if state.scheduled.status is RequestStatus.PREEMPTED:
                assert state.private_cache is not None
                assert state.private_cache.is_swapped_out
                assert not any(
                    len(layer_cache.table.held())
                    for layer_cache in state.private_cache.layers
                    if layer_cache.table is not None
                )


TestSharedLife = SharedLife.TestCase
TestSharedLife.settings = settings(
    max_examples=examples(8), stateful_step_count=16, suppress_health_check=[HealthCheck.too_slow]
)
