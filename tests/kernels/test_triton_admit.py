"""What heads with rules of their own let go of after a step: the Triton kernel against the policy in torch."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DEVICE, INTERPRET, quick, seeds

# isort: split
from millpond.cache.state.head_rules import HeadRuleState
from millpond.errors import OptionError
from millpond.kernels import gpu, ops
from millpond.kernels.args import HeadRuleArgs, PageRegions
from millpond.kernels.decode_rules import UNBOUNDED
from tests.helpers.kernels.ruled_heads import N_HEADS, N_SEQ, SEEN, filled, held, policy

ADMIT: Any = importlib.import_module("millpond.kernels.gpu.admit")  # the package shows the function under this name


def after_a_step(seed: int, masses: bool, budget: int, window: int, kernel: Any, chunk: int = 512) -> list[Any]:
    """Lengths, entries slot by slot and pages of a batch of which the second sequence has no token."""
    table, tokens = filled(torch.Generator().manual_seed(seed), masses, budget, DEVICE)
    before = table.lengths()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "admit", kernel)
        patch.setattr(ADMIT, "CHUNK", chunk)
        HeadRuleState(policy()).apply(table, tokens, np.array([SEEN - 1, -1, SEEN - 1]), window)
    after = table.lengths()
    assert (after[1] == before[1]).all()
    assert (after <= before).all()
    table.pool.check_integrity([table.held()])
    return [after.tolist(), held(table), len(table.held()) if INTERPRET else 0]


def in_torch(args: HeadRuleArgs) -> bool:
    return False


def compare(found: list[Any], wanted: list[Any]) -> None:
    assert found[0] == wanted[0]
    assert found[2] == wanted[2]
    assert all(map(torch.equal, found[1], wanted[1]))


@pytest.mark.parametrize(
    ("budget", "window", "masses"),
    [(UNBOUNDED, 0, True), (UNBOUNDED, 30, False), (25, 0, False), (12, 0, False), (9, 0, True), (3, 0, True)],
)
def test_the_kernel_lets_go_of_what_torch_lets_go_of(budget: int, window: int, masses: bool) -> None:
    """Of heads that take several chunks."""
    compare(*(after_a_step(7, masses, budget, window, kernel, 32) for kernel in (gpu.admit, in_torch)))


@quick
@given(seeds, st.booleans(), st.sampled_from([UNBOUNDED, 40, 12, 3]), st.sampled_from([0, 30]))
def test_any_batch(seed: int, masses: bool, budget: int, window: int) -> None:
    compare(*(after_a_step(seed, masses, budget, window, kernel) for kernel in (gpu.admit, in_torch)))


def test_many_leave_at_once() -> None:
    """More than a chunk's reduction finds at once, of equal scores the oldest first."""
    found = []
    for kernel in (gpu.admit, in_torch):
        table, tokens = filled(torch.Generator().manual_seed(5), False, UNBOUNDED, DEVICE)
        for s in range(N_SEQ):
            table.set_head_rules(s, 3, 2)
        before = table.lengths()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "admit", kernel)
            HeadRuleState(policy()).apply(table, tokens, np.full(N_SEQ, SEEN - 1), 0)
        found.append([table.lengths().tolist(), held(table), 0])
    compare(*found)
    assert (before - np.array(found[0][0])).max() > 9


@pytest.mark.parametrize(("budget", "launches"), [(UNBOUNDED, 1), (12, 2)])
def test_launches(budget: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One where no limit couples the heads of a sequence; of a limited one, each head must know of the others."""
    calls: list[tuple[int, ...]] = []
    real: Any = ADMIT.let_go

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            calls.append(grid)
            return real[grid]

    monkeypatch.setattr(ADMIT, "let_go", Counted())
    after_a_step(3, False, budget, 0, gpu.admit)
    assert calls == [(2 * N_HEADS,)] * launches


def test_nothing_to_do() -> None:
    table, tokens = filled(torch.Generator().manual_seed(1), False, UNBOUNDED, DEVICE)
    before = table.lens.tolist()
    none: Tensor = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    classes = policy().classes.table(DEVICE)
    of_none = (none, tokens.all, classes, table.head_rules, table.recent, none, none, none, 2, 0, False)
    assert gpu.admit(HeadRuleArgs(table.regions, *of_none))
    assert table.lens.tolist() == before


def test_lengths_that_cannot_be_written_are_refused() -> None:
    table, tokens = filled(torch.Generator().manual_seed(1), False, UNBOUNDED, DEVICE)
    regions = PageRegions(table.pool.arrays, table.pages, table.lens.long())
    one: Tensor = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    classes = policy().classes.table(DEVICE)
    with pytest.raises(OptionError, match="contiguous int32"):
        gpu.admit(
            HeadRuleArgs(
                regions, one, tokens.all, classes, table.head_rules, table.recent, one, one, one, 2, 0, bounded=False
            )
        )
