"""Parts of the learned rule, each against a plain model of it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from millpond.cache.paging.page_directory import BitDirectory, KeyTable, LinkedLists
from millpond.cache.paging.predictor import (
    FIRST_WEIGHT,
    MAX_ACCESSES,
    N_FEATURES,
    N_WEIGHTS,
    STEPS,
    AccessHistory,
    DiscardLabels,
    DiscardPredictor,
    Past,
    gap_step,
    load_weights,
    save_weights,
    shipped_weights,
    steps_of,
)
from millpond.cache.paging.rule import PageFacts
from millpond.errors import DataError


@pytest.mark.parametrize("spread", [1, 2**32, 2**61 + 7])
def test_a_key_table_is_a_dictionary(spread: int) -> None:
    draw, table, model = random.Random(0), KeyTable(), dict[int, int]()
    unused = list(range(300))[::-1]
    for _ in range(6000):
        key = draw.randrange(400) * spread % 2**64
        assert table.get(key) == model.get(key)
        if key in model:
            number = model.pop(key)
            table.remove(number)
            unused.append(number)
        elif unused and draw.random() < 0.7:
            model[key] = unused.pop()
            table.add(key, model[key])
        assert len(table) == len(model)
    assert all(table.get(key) == number for key, number in model.items())


def test_a_key_table_finds_what_is_filed_alone() -> None:
    table = KeyTable()
    for number, key in enumerate((7, 8, 7 + 2**40)):
        table.note(key, number)
    assert [table.get(key) for key in (7, 8)] == [None, None]
    table.file(1)
    table.move(1, 3)
    assert (table.get(8), len(table)) == (3, 1)
    table.remove(1)  # it is not filed any more
    assert table.get(8) == 3
    table.note(8, 0)
    table.file(0)  # in place of the other one
    assert (table.get(8), len(table)) == (0, 1)
    table.remove(0)
    assert (table.get(8), len(table)) == (None, 0)


def test_linked_lists_are_lists() -> None:
    draw, lists, model = random.Random(1), LinkedLists(2), [list[int](), list[int]()]
    for _ in range(40):
        lists.grow()
    for _ in range(3000):
        number, which = draw.randrange(40), draw.randrange(2)
        home = next((one for one in model if number in one), None)
        assert (number in lists) == (home is not None)
        if home is not None:
            home.remove(number)
            lists.remove(number)
        elif model[which] and draw.random() < 0.5:
            other = draw.choice(model[which])
            model[which].insert(model[which].index(other), number)
            lists.insert_before(other, number)
        else:
            model[which].append(number)
            lists.append(which, number)
        assert [list(lists.walk(at)) for at in (0, 1)] == model
        assert [lists.oldest(at) for at in (0, 1)] == [one[0] if one else None for one in model]


def test_the_history_reaches_back_as_far_as_its_window() -> None:
    draw, history, window = random.Random(2), AccessHistory(64), 64
    seen: list[int] = []
    for now in range(3000):
        key = draw.randrange(20) if draw.random() < 0.7 else draw.randrange(500)
        at = [n for n, other in enumerate(seen) if other == key]
        past = history.access(key)
        if not at or now - at[-1] >= window:
            assert past == Past(0, None, 0, 0)
        else:
            first = len(at) - 1
            while first > 0 and at[first] - at[first - 1] < window:
                first -= 1
            before = gap_step(at[-1] - at[-2]) if first < len(at) - 1 else 0
            assert past == Past(min(len(at) - first, MAX_ACCESSES), at[-1], gap_step(now - at[-1]), before)
        seen.append(key)


def test_labels_are_those_of_the_best_rule_that_may_also_keep_nothing() -> None:
    """At the granularity of 16 accesses, against counts of each time alone."""
    draw, labels, window, pages = random.Random(3), DiscardLabels(512), 512, 5
    held, last = dict[int, int](), dict[int, int]()
    kinds = set()
    for now in range(4000):
        key = draw.randrange(12) if draw.random() < 0.6 else 100 + draw.randrange(400)
        if key in last and now - last[key] < window:
            times = range(last[key] >> 4, now >> 4)
            expected = any(held.get(time, 0) >= pages for time in times)
            if not expected:
                for time in times:
                    held[time] = held.get(time, 0) + 1
            assert labels.discards(last[key], now, pages) == expected
            kinds.add(expected)
        last[key] = now
    assert kinds == {True, False}
    assert DiscardLabels(512).discards(0, 100, None) is False


def test_features_have_their_own_weights() -> None:
    draw = random.Random(4)
    highest = [0] * N_FEATURES
    for _ in range(3000):
        length = draw.choice([1, 5, 5000])
        facts = PageFacts(0, -1, 0, draw.randrange(length), length, draw.randint(0, length))
        steps = steps_of(facts, draw.randint(0, MAX_ACCESSES), draw.randrange(13), draw.randrange(13))
        for at, (step, size) in enumerate(zip(steps, STEPS.values(), strict=True)):
            assert FIRST_WEIGHT[at] <= step < FIRST_WEIGHT[at] + size
            highest[at] = max(highest[at], step - FIRST_WEIGHT[at])
    assert highest == [size - 1 for size in STEPS.values()]
    assert [gap_step(gap) for gap in (1, 127, 128, 2**40)] == [1, 1, 2, 12]


@pytest.mark.parametrize(("depth", "known", "beyond", "within"), [(9, 5, 3, 0), (5, 9, 0, 3), (7, 7, 0, 0)])
def test_a_page_lies_beyond_what_is_known_or_within_it(depth: int, known: int, beyond: int, within: int) -> None:
    steps = steps_of(PageFacts(0, -1, 0, depth, 20, known), 0, 0, 0)
    assert [step - first for step, first in zip(steps, FIRST_WEIGHT, strict=True)][-2:] == [beyond, within]


def test_pages_that_are_kept_keep_those_before_them() -> None:
    """Victims in any order of bits have no followers, and pages to discard go first."""
    draw, directory, parents = random.Random(5), BitDirectory(), dict[int, int]()
    for number in range(50):
        directory.grow()
        parents[number] = (number - 1) // 3 if number else -1
    for _ in range(3000):
        number, path = draw.randrange(50), list[int]()
        while number >= 0:
            path.append(number)
            number = parents[number]
        for page in reversed(path):
            directory.touch(page, parents[page], draw.random() < 0.5)
        assert set(directory.in_order()) == {page for page in range(50) if page in directory}
        while len(directory) > 20:
            victim = directory.evict()
            assert victim is not None
            assert not any(page in directory and parents[page] == victim for page in range(50))
    simple = BitDirectory()
    for number, discard in enumerate((False, True, False, True)):
        simple.grow()
        simple.touch(number, -1, discard)
    assert [simple.evict() for _ in range(5)] == [1, 3, 0, 2, None]


def test_a_predictor_learns_what_is_discarded() -> None:
    predictor = DiscardPredictor(np.zeros(N_WEIGHTS, np.float32))
    deep, shallow = (steps_of(PageFacts(0, -1, 0, depth, 9, 0), 0, 0, 0) for depth in (8, 0))
    assert predictor.log_odds(deep) == 0
    for now in range(3000):  # every second access is a page that comes again after two accesses
        predictor.seen(now, shallow if now % 2 else deep, now - 2 if now % 2 and now > 2 else None, 10)
        if now % 3 == 0:
            predictor.fit()
    assert predictor.log_odds(deep) > 2
    assert predictor.log_odds(shallow) < -2
    fixed = DiscardPredictor(predictor.weights, learns=False)
    fixed.seen(0, deep, None, 10)
    fixed.fit()
    assert fixed.log_odds(deep) == pytest.approx(predictor.log_odds(deep), abs=1e-5)


def test_weights_are_saved_and_damaged_ones_refused(tmp_path: Path) -> None:
    file, weights = tmp_path / "pager.safetensors", np.arange(N_WEIGHTS, dtype=np.float32)
    save_weights(file, weights, "nothing")
    assert (load_weights(file) == weights).all()
    assert shipped_weights().any(), "the package has a predictor that was fitted"
    for bad, message in (
        ({"weights": weights[1:]}, r"weights \(121,\) must be 122 finite numbers"),
        ({"weights": weights * np.nan}, "must be 122 finite numbers"),
        ({"other": weights}, "weights none must be"),
    ):
        save_file(bad, file)
        with pytest.raises(DataError, match=message):
            load_weights(file)
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="cannot be read"):
        load_weights(file)
