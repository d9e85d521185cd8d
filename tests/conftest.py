"""One thread per process: the models are tiny, and several test processes share the machine.

Without a GPU the Triton kernels run in the interpreter of Triton, which must be chosen before its first import; parts
of torch, which the package brings in, import it. Examples of Hypothesis have no deadline: a busy machine is no bug.
`make test-slow` runs the property tests again, with `--hypothesis-profile=thorough`.
"""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

if not Path("/dev/nvidiactl").exists():  # torch would say, but importing it may import Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Read once, as torch is imported. Tests of two threads on cores that are taken would spend most of their time spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from tests.helpers.cache_argument import use_new_names
from tests.helpers.examples import QUICK, THOROUGH
from tests.helpers.random_heads import random_heads_where_none_are

torch.set_num_threads(1)
settings.register_profile("quick", deadline=None, max_examples=QUICK)
settings.register_profile("thorough", deadline=None, max_examples=THOROUGH)
settings.load_profile("quick")
use_new_names()


@pytest.hookimpl(tryfirst=True)  # before items are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `covering`, the quick suite has a selection with every value of every parameter.

    The next combination is the one with the most values that none before had; of several, the one whose values were
    taken least often, and then the first. Of a test marked `in_turns(first, of=n)` it has every n-th combination from
    `first` on: tests that take the same values from different places on meet them together. The others are slow.
    """
    for combinations in _by_test(items, "covering"):
        _mark_slow(_rest(combinations))
    for combinations in _by_test(items, "in_turns"):
        turn = combinations[0].get_closest_marker("in_turns")
        assert turn is not None
        first, of = turn.args[0], turn.kwargs["of"]
        _mark_slow(item for n, item in enumerate(combinations) if n % of != first)


def pytest_collection_finish() -> None:
    """The modules of torch and of the tests stay until the end; no garbage collection has to walk over them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Drop the frames of the last failure: native objects in them would be reported as leaks, below the failure."""
    for name in ("last_exc", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    gc.unfreeze()
    gc.collect()


def _by_test(items: list[pytest.Item], marker: str) -> list[list[pytest.Function]]:
    """The combinations of each test that is marked, but for those that are slow anyway."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("slow") is not None:
            continue
        if item.get_closest_marker(marker) is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return list(tests.values())


def _mark_slow(items: Iterable[pytest.Function]) -> None:
    for item in items:
        item.add_marker(pytest.mark.slow)


def _rest(items: list[pytest.Function]) -> list[pytest.Function]:
    """The combinations of one test that are not needed for every value of every parameter."""
    values = {item: [(name, _value(of)) for name, of in item.callspec.params.items()] for item in items}
    taken: Counter[tuple[str, object]] = Counter()
    missing = {value for own in values.values() for value in own}
    while missing:
        best = max(
            values, key=lambda item: (len(missing.intersection(values[item])), -sum(taken[v] for v in values[item]))
        )
        own = values.pop(best)
        missing.difference_update(own)
        taken.update(own)
    return list(values)


def _value(of: object) -> object:
    """A number or a text itself, and what is neither by which object it is."""
    return of if of is None or isinstance(of, str | int | float) else id(of)


@pytest.fixture(scope="session", autouse=True)
def _heads() -> Iterator[None]:
    with random_heads_where_none_are():
        yield
