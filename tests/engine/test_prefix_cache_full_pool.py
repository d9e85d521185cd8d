"""Prompts that begin alike in a pool that is full: the longest unused blocks make room for new ones."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import pytest

from millpond.engine.engine import Engine
from millpond.engine.memory_estimate import estimate
from millpond.engine.request import CacheOptions, Request
from tests.engine.test_codecs import model as wide_model
from tests.helpers.engine.helpers import add, engine_for, greedy
from tests.helpers.hf.families import shared_model, text

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")

#: Tokens that prompts have in common on three levels, and how many go on from each.
SHAPE = ((144, 56, 24), (4, 4, 4))
SLOTS = 4


def tree_of_prompts(lengths: tuple[int, ...], widths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Prompts in the order of a walk: each begins as the one before it, as far as it can."""
    prompts = []
    for place in product(*map(range, widths)):
        parts = [
            text(1, length, seed=1 + int("".join(map(str, place[: level + 1]))) + 1000 * level)[0].tolist()
            for level, length in enumerate(lengths)
        ]
        prompts.append(tuple(token for part in parts for token in part))
    return prompts


def distinct(prompts: list[tuple[int, ...]]) -> int:
    """Tokens that differ, with all that is before them."""
    return len({prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)})


def bytes_of(n_tokens: int, codec: str | None = None, new: int = 2) -> int:
    """What a prompt of so many tokens and its answer hold at most."""
    engine = Engine(shared_model("llama") if codec is None else wide_model(), method="full", page_slots=SLOTS)
    cache_factory = engine._parts.decode_groups.group(CacheOptions(codec=codec)).cache_factory
    need = estimate(cache_factory, n_tokens, new, 1).peak(1)
    engine.close()
    return need


def spared(engine: Engine, prompts: list[tuple[int, ...]], new: int, together: int = 1, **cache: object) -> float:
    """The share of all prompts' tokens that were not read, `together` requests in flight at a time."""
    waiting = [
        Request(request_id=str(n), prompt=prompt, params=greedy(new), cache=CacheOptions(**cache))  # type: ignore[arg-type]
        for n, prompt in enumerate(prompts)
    ][::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        while waiting or engine.busy:
            while waiting and len(engine._requests) < together:
                add(engine, waiting.pop())
            for output in engine.step():
                assert output.error is None
            engine.check_integrity()
    return engine.stats().shared_tokens / sum(map(len, prompts))


PROMPTS = tree_of_prompts(*SHAPE)
#: What a tree that never forgets would spare.
SHAREABLE = 1 - distinct(PROMPTS) / sum(map(len, PROMPTS))


@pytest.mark.parametrize(
    "cache",
    [{"method": "full"}, {"method": "snapkv", "budget": "20%", "options": {"window": 16}}],
    ids=["full", "snapkv"],
)
def test_sorted_prompts_share_in_memory_for_a_tenth_of_them(cache: dict[str, object]) -> None:
    limit = bytes_of(distinct(PROMPTS) // 10, new=0)
    engine = engine_for("full", prefix_cache=True, kv_memory=limit, page_slots=SLOTS, max_step_tokens=256)
    found = spared(engine, PROMPTS, 2, **cache)
    assert 0.785 < SHAREABLE < 0.795
    assert found > SHAREABLE - 0.04
    assert engine.stats().preemptions == 0
    engine.close()


def test_sorted_prompts_share_in_memory_for_a_quarter_beside_codes() -> None:
    prompts = tree_of_prompts((192, 64, 48), (2, 3, 3))
    shareable = 1 - distinct(prompts) / sum(map(len, prompts))
    limit = bytes_of(distinct(prompts) // 4, "int4")
    engine = Engine(wide_model(), method="full", codec="int4", kv_memory=limit, page_slots=SLOTS, prefix_cache=True)
    found = spared(engine, prompts, 2)
    assert found > shareable - 0.05
    assert engine.stats().preemptions == 0
    engine.close()


@pytest.mark.parametrize("method", ["full", "snapkv"])
def test_prompts_share_while_others_run(method: str) -> None:
    engine = engine_for(method, prefix_cache=True, kv_memory=bytes_of(4 * len(PROMPTS[0])), max_step_tokens=256)
    assert spared(engine, PROMPTS[:32], 12, together=4) > 0.5  # the first of each kind are read side by side
    assert engine.stats().preemptions == 0
    engine.close()


def test_blocks_that_a_request_holds_outlive_older_demands() -> None:
    """Letting go of them would free no page."""
    length = len(PROMPTS[0])
    engine = engine_for("full", prefix_cache=True, kv_memory=bytes_of(2 * length + 60), max_step_tokens=256)
    first, other = PROMPTS[0], PROMPTS[-1]
    add(engine, Request(request_id="holds", prompt=first, params=greedy(30)))
    engine.step()
    held = len(engine._parts.prefix_cache.tree)
    assert held == length // SLOTS
    for n, prompt in enumerate([other, PROMPTS[40], other]):
        add(engine, Request(request_id=str(n), prompt=prompt, params=greedy(2)))
        for _ in range(3):
            engine.step()
        engine.check_integrity()
    assert engine.stats().preemptions == 0
    kinds = {block.key[0] for block in engine._parts.prefix_cache.tree._blocks.values()}
    assert [len(engine._parts.prefix_cache.tree.find(kind, np.array(first), SLOTS)) for kind in kinds] == [held]
    engine.close()
