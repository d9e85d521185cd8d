"""Moved batches and forked texts: a layer with a quantized part holds the entries of one without."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.cache.layer.draft_rollback import DraftRollback
from millpond.cache.layer.layer_cache import LayerCache
from tests.helpers.codec.layers import SHAPE, check, decode, feed, make, parts, positions, tokens
from tests.helpers.examples import examples

TEXT = tokens(2000, batch=1, seed=3)


class Moves(RuleBasedStateMachine):
    """The same calls to two layers under a rule that no number changes: the newest entries stay, or a random set."""

    method, codec = "window", "flexgen4"

    def __init__(self) -> None:
        super().__init__()
        options = {"sinks": 2} if self.method == "window" else {"sinks": 2, "recent": 8}
        self.pair = [make(name, self.method, 90, **options) for name in (self.codec, "bf16")]
        self.states: list[list[object]] = []
        self.sequences = 2
        self.run(70)

    def run(self, n: int) -> None:
        start = self.pair[0].columns
        qkv = tuple(t[:, :, start : start + n].expand(self.sequences, -1, -1, -1) for t in TEXT)
        for cache in self.pair:
            cache.tracker.begin_pass()
            cache.attend(*qkv, None, SHAPE)

    @rule(n=st.integers(2, 60))
    def read(self, n: int) -> None:
        self.run(n)

    @rule(n=st.integers(1, 50))
    def write(self, n: int) -> None:
        for _ in range(n):
            self.run(1)

    @rule(order=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def select(self, order: list[int]) -> None:
        self.drop_states()
        chosen = [o % self.sequences for o in order]
        for cache in self.pair:
            cache.select(chosen)
            cache.tracker.select(chosen)
        self.sequences = len(chosen)

    @precondition(lambda self: not self.states)
    @rule()
    def fork(self) -> None:
        self.states = [[cache.fork(), cache.columns, cache.tracker.seen.copy()] for cache in self.pair]

    @precondition(lambda self: self.states)
    @rule()
    def restore(self) -> None:
        for cache, (state, columns, seen) in zip(self.pair, self.states, strict=True):
            cache.restore(state)
            cache.tracker.rewind(columns, seen)
        self.states = []

    def drop_states(self) -> None:
        for state, *_ in self.states:
            state.release()
        self.states = []

    @invariant()
    def holds_the_same(self) -> None:
        for s in range(self.sequences):
            assert positions(self.pair[0], s) == positions(self.pair[1], s)
        table, quantized = parts(self.pair[0])
        held = [table.held(), *(state.table.held() for state, *_ in self.states[:1])]
        table.pool.check_integrity(held)
        quantized.pool.check_integrity(
            [quantized.held(), *(state.table.quantized.held() for state, *_ in self.states[:1])]
        )
        close(self.pair[0], self.pair[1], self.sequences)

    def teardown(self) -> None:
        self.drop_states()
        for cache in self.pair:
            cache.reset()


class RandomMoves(Moves):
    method, codec = "random", "int8"


def close(coded: LayerCache, plain: LayerCache, sequences: int) -> None:
    """What is held is, up to the format, what came in."""
    for s in range(sequences):
        a, b = coded.read(s), plain.read(s)
        here = b.positions >= 0
        n = here.shape[1]
        error = (a.keys[:, :n].float() - b.keys.float()).norm() / b.keys.norm()
        assert error < 0.15, error


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=examples(8), stateful_step_count=12)
TestRandomMoves = RandomMoves.TestCase
TestRandomMoves.settings = settings(max_examples=examples(8), stateful_step_count=12)


@pytest.mark.parametrize("codec", ["int4", "flexgen4", "think:0.5:0.25", "fp8"])
@pytest.mark.parametrize("n", [1, 30, 90])
def test_crop_of_a_full_cache(codec: str, n: int) -> None:
    """The newest tokens can be cut off, quantized ones too; the others keep their codes, and the text goes on."""
    cache, qkv = make(codec), tokens(330)
    feed(cache, qkv, 0, 200)
    decode(cache, qkv, 200, 230)
    before = cache.read(0)
    tokens_ = np.array([n])
    cache.tracker.rewind(230 - n, cache.tracker.seen - n)
    cache.truncate(n, tokens_)
    assert positions(cache) == [list(range(230 - n))] * 2
    assert torch.equal(cache.read(0).keys[:, : 230 - n], before.keys[:, : 230 - n])
    check(cache)
    decode(cache, qkv, 230 - n, 330 - n)
    assert positions(cache) == [list(range(330 - n))] * 2
    check(cache)


@pytest.mark.covering
@pytest.mark.parametrize("codec", ["int4", "flexgen4", "kivi2", "rotated4", "mikv"])
@pytest.mark.parametrize("accepted", [0, 3, 7])
def test_drafts_are_taken_back_exactly(codec: str, accepted: int) -> None:
    """Drafting and taking back changes nothing, although pages were quantized and entries evicted in between."""
    qkv = tokens(300)
    plain, drafted = (make(codec, "h2o", 170, sinks=1, recent=0.8) for _ in range(2))
    feed(plain, qkv, 0, 195)
    decode(plain, qkv, 195, 196 + accepted)
    feed(drafted, qkv, 0, 195)
    draft_rollback = DraftRollback(drafted.tracker, recording=True)
    wrong = tuple(t.flip(2) for t in tokens(8, seed=8))
    right = tuple(t[:, :, 195 : 196 + accepted] for t in qkv)
    own = tuple(torch.cat([t, w[:, :, accepted:7]], 2) for t, w in zip(right, wrong, strict=True))
    drafted.tracker.begin_pass()
    draft_rollback.attend(drafted, *own, None, SHAPE)
    draft_rollback.crop([drafted], 7 - accepted)
    assert positions(plain) == positions(drafted)
    a, b = (torch.cat(decode(cache, qkv, 196 + accepted, 290), 2) for cache in (plain, drafted))
    assert torch.equal(a, b)
    assert torch.equal(plain.read(0).keys, drafted.read(0).keys)
    check(drafted)


@pytest.mark.parametrize("codec", ["int4", "flexgen4", "mikv", "think"])
def test_reordered_beams_go_on_as_their_own(codec: str) -> None:
    qkv = tokens(300, batch=2, seed=6)
    cache, alone = make(codec, "h2o", 120, sinks=1), make(codec, "h2o", 120, sinks=1)
    feed(cache, qkv, 0, 180)
    decode(cache, qkv, 180, 200)
    cache.select([1, 1, 0])
    cache.tracker.select([1, 1, 0])
    turned = tuple(t[[1, 1, 0]] for t in qkv)
    out = torch.cat(decode(cache, turned, 200, 300), 2)
    own = tuple(t[1:] for t in qkv)
    feed(alone, own, 0, 180)
    expected = torch.cat(decode(alone, own, 180, 300), 2)[..., 20:, :]
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], expected[0])
    assert not torch.equal(out[2], expected[0])
    check(cache)
