"""What leaves after a step of heads with nested rules: the native kernel against torch operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.cache.state.head_rules import HeadRuleState
from millpond.kernels import native, ops
from millpond.kernels.decode_rules import UNBOUNDED
from tests.helpers.examples import examples
from tests.helpers.kernels.ruled_heads import N_HEADS, N_SEQ, SEEN, filled, held, policy

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no native kernels")


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
