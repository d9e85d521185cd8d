"""What leaves after a step of heads with nested rules: the native kernel against torch operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool
from millpond.cache.state.head_rules import HeadRuleState
from millpond.cache.state.token_ids import TokenIds
from millpond.kernels import native, ops
from millpond.kernels.decode_rules import UNBOUNDED
from millpond.methods import METHODS
from millpond.policy.head_rules import HeadRulesPolicy
from tests.helpers.examples import examples
from tests.helpers.kernels.args import write_args

N_SEQ, N_HEADS, SEEN = 3, 4, 90


def policy() -> HeadRulesPolicy:
    built = METHODS.get("fastgen")(special="90;91", punctuation="80;81;82", sinks=2)
    assert isinstance(built, HeadRulesPolicy)
    return built


pytestmark = pytest.mark.skipif(not native.is_available(), reason="no native kernels")


def filled(draw: torch.Generator, masses: bool, budget: int) -> tuple[PageTable, TokenIds]:
    """A batch in the middle of its text: ragged heads in any order, scores that often tie, rules of all kinds."""
    pool = PagePool(8, 4, torch.bfloat16, slots=8, masses=masses)
    table = PageTable(pool, N_SEQ, N_HEADS)
    for s in range(N_SEQ):
        lens = torch.randint(1, 60, (N_HEADS,), generator=draw).numpy().astype(np.int32)
        table.reserve(s, lens)
        width = int(lens.max())
        older = torch.stack([torch.randperm(SEEN - 1, generator=draw)[:width] for _ in range(N_HEADS)])
        older[torch.arange(N_HEADS), torch.from_numpy(lens).long() - 1] = SEEN - 1  # the new token, in the last slot
        positions, lens_now = older.int(), torch.from_numpy(lens)
        index = torch.arange(width, dtype=torch.int32).expand(N_HEADS, -1)
        ops.write(
            *write_args(
                pool.arrays,
                table.pages[table.rows(s)],
                lens_now * 0,
                lens_now,
                index,
                torch.randn(N_HEADS, width, 8, generator=draw),
                torch.randn(N_HEADS, width, 4, generator=draw),
                positions,
                torch.randint(0, 6, (N_HEADS, width), generator=draw) / 4 - 0.5,
                torch.rand(N_HEADS, width, generator=draw) if masses else None,
            )
        )
        table.set_lengths(s, lens)
        table.set_budget(s, np.full(N_HEADS, budget, dtype=np.int32), 0)
        table.set_head_rules(s, torch.randint(0, 5, (N_HEADS,), generator=draw).numpy(), 20 + s)
    tokens = TokenIds()
    ids = torch.randint(70, 95, (N_SEQ, SEEN), generator=draw)
    tokens.expect(ids, 0)
    tokens.take(0, torch.arange(SEEN).int().expand(N_SEQ, -1), SEEN)
    return table, tokens


def held(table: PageTable) -> list[Tensor]:
    dense = ops.read(table.regions, int(table.lengths().max()))
    return [part for part in dense if part is not None]


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([UNBOUNDED, 40, 12, 3]), st.sampled_from([0, 30]))
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
def test_the_kernel_lets_go_of_what_torch_lets_go_of(seed: int, masses: bool, budget: int, window: int) -> None:
    found = []
    for kernel in (True, False):
        table, tokens = filled(torch.Generator().manual_seed(seed), masses, budget)
        before = table.lengths()
        with pytest.MonkeyPatch.context() as patch:
            if not kernel:
                patch.setattr(ops, "admit", lambda *of, **more: False)
            HeadRuleState(policy()).apply(table, tokens, np.array([SEEN - 1, -1, SEEN - 1]), window)
        table.pool.check_integrity([table.held()])
        assert (table.lengths()[1] == before[1]).all()  # a sequence without a token
        found.append((table.lengths().tolist(), held(table), len(table.held())))
    assert found[0][0] == found[1][0]
    assert found[0][2] == found[1][2]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_something_leaves_and_something_stays() -> None:
    """The drawn cases are no trivial ones."""
    table, tokens = filled(torch.Generator().manual_seed(1), False, 12)
    before = table.lengths()
    HeadRuleState(policy()).apply(table, tokens, np.full(N_SEQ, SEEN - 1), 0)
    after = table.lengths()
    assert (after.sum(1) <= 12 * N_HEADS).all()
    assert (after < before).any()
