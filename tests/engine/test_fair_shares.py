"""Requests whose messages keep a share of the budget: in chunked prompts, batches, moves, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from millpond.engine.cache_snapshots import held_positions
from millpond.engine.engine import Engine
from millpond.errors import OptionError
from millpond.prompt_marks import PromptMarks
from tests.engine.test_kept_spans import LENGTH, small_engine
from tests.helpers.engine.helpers import METHODS, add, ask, engine_for, finish, greedy, tokens
from tests.helpers.hf.families import shared_model

SHARE, BUDGET = 0.5, 17  # of the 57 tokens 30 %
SPANS = ((0, 12), (12, 40), (42, 55))
FAIR = tuple((begin, end, SHARE) for begin, end in SPANS)


def steps_that_hold(engine: Engine, names: tuple[str, ...]) -> dict[str, Any]:
    """Step to the end; after each step the named requests that have read their prompts hold their shares."""
    done, checked = {}, 0
    while engine.busy:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        for name in names:
            found = engine.cache_of(name)
            if found is None or (seen := int(found[0].tracker.seen[found[1]])) < LENGTH:
                continue
            checked += 1
            for layer in found[0].layers:
                assert layer.table is not None
                for parts in zip(*held_positions(layer, found[1]), strict=True):
                    held = [int(position) for part in parts for position in part if position >= 0]
                    for begin, end in SPANS:
                        least = math.floor((end - begin) * min(SHARE * BUDGET, BUDGET - 4 - BUDGET // 2) / seen)
                        assert sum(begin <= position < end for position in held) >= least
        engine.check_integrity()
    assert checked >= 3 * len(names)
    return done


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", ["h2o", "snapkv", "window"])
def test_requests_hold_them_and_others_answer_as_before(method: str) -> None:
    alone = small_engine(method)
    add(alone, ask(40), ask(31))
    before = finish(alone)
    alone.close()
    engine = small_engine(method)
    add(engine, ask(40), ask(LENGTH, greedy(n=2), name="fair", marks=PromptMarks(shares=FAIR, report=SPANS)), ask(31))
    done = steps_that_hold(engine, ("fair",))
    for name in ("40", "31"):
        assert tokens(done[name]) == tokens(before[name])
    assert done["fair"].error is None
    assert all(of.share < 1 for of in done["fair"].completions[0].forgotten)
    engine.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_without_them_a_first_message_is_lost_whole() -> None:
    engine = small_engine("window")
    add(
        engine,
        ask(LENGTH, name="plain", marks=PromptMarks(report=SPANS)),
        ask(LENGTH, name="fair", marks=PromptMarks(report=SPANS, shares=FAIR)),
    )
    done = finish(engine)
    assert [done[name].completions[0].forgotten[0].share == 1 for name in ("plain", "fair")] == [True, False]
    engine.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_request_that_moves_takes_them_along() -> None:
    here, there, whole = (engine_for("window") for _ in range(3))
    add(here, ask(LENGTH, name="fair", marks=PromptMarks(shares=FAIR)))
    add(whole, ask(LENGTH, name="fair", marks=PromptMarks(shares=FAIR)))
    while not (found := here.step()) or len(found[0].completions[0].token_ids) < 3:
        pass
    there.import_request(here.export_request("fair"))
    assert tokens(finish(there)["fair"]) == tokens(finish(whole)["fair"])
    for engine in (here, there, whole):
        engine.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_prompt_that_goes_on_from_shared_pages_has_them() -> None:
    alone, engine = (small_engine("window", prefix_cache="lru") for _ in range(2))
    fair = ask(LENGTH, name="fair", marks=PromptMarks(shares=FAIR, report=SPANS))
    alone.add(fair)
    right = steps_that_hold(alone, ("fair",))["fair"]
    engine.add(ask(LENGTH, name="first"))
    engine.drain()
    engine.add(fair)
    done = steps_that_hold(engine, ("fair",))["fair"]
    assert engine.stats().shared_tokens
    assert done.completions[0].forgotten == right.completions[0].forgotten
    for each in (alone, engine):
        each.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_requests_that_leave_the_pool_come_back_with_them() -> None:
    engine = small_engine("snapkv", prefix_cache=False, kv_memory="40kB", overcommit=4)
    names = tuple(f"fair {n}" for n in range(4))
    add(engine, *(ask(LENGTH, greedy(40), name=name, marks=PromptMarks(shares=FAIR)) for name in names))
    steps_that_hold(engine, names)
    assert engine.stats().preemptions, "a limit that does not matter tests nothing"
    engine.close()


@pytest.mark.parametrize(
    ("method", "fair", "match"),
    [
        ("h2o", ((0, LENGTH + 1, 0.5),), "must lie in the prompt"),
        ("h2o", ((4, 3, 0.5),), "shares: .* is no span"),
        ("h2o", ((0, 4, 0.5), (3, 6, 0.5)), "overlaps"),
        ("h2o", ((0, 4, 2),), "above 0"),
        ("h2o", ((0, 4),), "begin, end, share"),
        ("streaming", FAIR, "positions='absolute'"),
        ("fastgen", FAIR, "rules of their own"),
    ],
)
def test_what_has_no_share_is_refused_before_it_is_read(method: str, fair: Any, match: str) -> None:
    engine = Engine(shared_model("llama"), method=method, options=METHODS[method], budget=20, page_slots=4)
    with pytest.raises(OptionError, match=match):
        engine.add(ask(LENGTH, marks=PromptMarks(shares=fair)))
    assert not engine.busy
    engine.close()
