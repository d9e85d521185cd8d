"""What a page table follows on the host of lengths that a kernel writes on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool
from tests.helpers.device_memory import check_pages, set_apart
from tests.helpers.examples import examples

N_SEQ, HEADS = 2, 3
#: What happens in a step: which sequences take part, and for each region whether it grows and how many entries leave.
STEPS = st.lists(
    st.tuples(
        st.lists(st.booleans(), min_size=N_SEQ, max_size=N_SEQ),
        st.lists(st.integers(0, 5), min_size=N_SEQ * HEADS, max_size=N_SEQ * HEADS),
        st.integers(0, 19),
    ),
    max_size=70,
)


def table_of(slots: int, first: int) -> PageTable:
    table = PageTable(PagePool(2, 2, torch.float32, slots=slots), N_SEQ, HEADS)
    for sequence in range(N_SEQ):
        lens = np.full(HEADS, first, dtype=np.int32)
        table.reserve(sequence, lens)
        table.set_lengths(sequence, lens)
    return table


def codes_without_end() -> Any:
    """In place of codes: any region may have some, and none is ever due."""
    return SimpleNamespace(
        may_live=np.full(N_SEQ * HEADS, True), steps_until_check=100, stepped=lambda buries: None, parts=()
    )


@given(st.sampled_from([2, 8, 16]), st.integers(0, 40), st.booleans(), STEPS)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
def test_there_is_room_for_what_the_device_adds(slots: int, first: int, falls: bool, steps: Any) -> None:
    """Of heads that let entries go after a step (`falls`), and of regions whose victim may leave no slot."""
    with pytest.MonkeyPatch.context() as patch:
        counts = set_apart(patch)
        table = table_of(slots, first)
        if not falls:
            table.quantized = codes_without_end()
        for active, changes, other in steps:
            need, held = table.pages_for_step(falls, True), len(table.held())
            table.make_room(falls)
            assert len(table.held()) <= held + need
            check_pages(table, 1, falls=falls)
            there, runs = table.lens.numpy(), np.repeat(np.array(active), HEADS)
            there += runs & (falls | (np.array(changes) > 1))
            table.stepped(falls, np.array(active))
            if falls:
                there -= np.minimum(there, runs * np.maximum(np.array(changes) - 3, 0)).astype(np.int32)
                table.admitted()
            check_pages(table, falls=falls)
            if not other:
                table.set_budget(0, np.full(HEADS, 100, dtype=np.int32), 0)
        before = counts["lengths"]
        assert (table.lengths().ravel() == table.lens.numpy()).all()
        assert counts["lengths"] <= before + 1
        table.pool.check_integrity([table.held()])


@pytest.mark.parametrize("falls", [False, True])
def test_bounds_come_back_to_the_lengths(falls: bool) -> None:
    """Nothing grows, so after a look no region has more pages than for its entries and the next one."""
    with pytest.MonkeyPatch.context() as patch:
        counts = set_apart(patch)
        table = table_of(8, 13)
        if not falls:
            table.quantized = codes_without_end()
        most = []
        for _ in range(200):
            table.make_room(falls)
            most.append(len(table.held()))
            table.stepped(falls, np.full(N_SEQ, True))
            if falls:
                table.admitted()
        assert max(most) == 3 * N_SEQ * HEADS
        assert min(most[20:]) == 2 * N_SEQ * HEADS
        assert counts["lengths"] == 0
        assert 30 <= counts["looks"] <= 200 / 4


@pytest.mark.parametrize("budget", [100, 5])
@pytest.mark.parametrize("begin", range(0, 24, 3))
def test_pages_that_were_freed_come_back_in_time(begin: int, budget: int) -> None:
    """Regions grow at each step after some in which nothing did, which had left them with a page too many.

    They do beyond their budget too, if it fell: there are codes that leave.
    """
    with pytest.MonkeyPatch.context() as patch:
        set_apart(patch)
        table = table_of(8, 13)
        table.quantized = codes_without_end()
        table.set_budgets(np.full((N_SEQ, HEADS), budget, dtype=np.int32))
        for step in range(60):
            table.make_room(False)
            check_pages(table, 1)
            table.lens += int(step >= begin)
            table.stepped(False, np.full(N_SEQ, True))


def test_budgets_are_set_without_asking_for_lengths() -> None:
    """A share of the tokens is another number every few steps."""
    with pytest.MonkeyPatch.context() as patch:
        counts = set_apart(patch)
        table = table_of(8, 13)
        table.stepped(True, np.full(N_SEQ, True))
        table.admitted()
        table.lens += 1
        table.set_budgets(np.full((N_SEQ, HEADS), 20, dtype=np.int32))
        table.set_head_rules(1, 2, 3)
        assert not counts
        assert table.capacities.tolist() == [20] * N_SEQ * HEADS
        assert table.head_rules.tolist() == [0, 0, 0, 2, 2, 2]
        assert (table.lengths() == 14).all()
        table.select([1])
        assert table.lens.tolist() == [14] * HEADS


def test_lengths_that_are_behind_stay_so_until_they_are_read() -> None:
    """A step in which every region grows comes right after one in which a kernel chose its victims."""
    with pytest.MonkeyPatch.context() as patch:
        set_apart(patch)
        table = table_of(8, 3)
        table.quantized = codes_without_end()
        table.stepped(False, np.full(N_SEQ, True))
        assert table.is_behind
        table.stepped(True, np.full(N_SEQ, True))
        assert table.is_behind
        assert (table.lengths() == 3).all()
        assert not table.is_behind
