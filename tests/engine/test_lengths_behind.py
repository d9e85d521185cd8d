"""Caches whose lengths only the device knows after a step, in engines whose steps run ahead.

They are those that evict at each step and store codes, where the slot of a victim says which part grew, and those of
heads with rules of their own. The device's memory is set apart (`tests.helpers.device_memory`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.errors import BudgetError
from tests.engine import test_codecs
from tests.engine.test_run_ahead import Outcome, outcome_of
from tests.helpers.device_memory import check_pages, set_apart
from tests.helpers.engine.helpers import greedy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens

#: Rules of which some let entries go, in a model that attends to nothing in particular.
RULES = {"special": "2;3", "punctuation": "5;6;7", "threshold": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "h2o int4": {"method": "h2o", "budget": "70%", "codec": "int4"},
    "h2o fp8": {"method": "h2o", "budget": "70%", "codec": "fp8"},
    "tova flexgen4": {"method": "tova", "budget": "70%", "codec": "flexgen4"},
    "random fp8": {"method": "random", "budget": "50%", "codec": "fp8"},
    "h2o by layer": {"method": "h2o", "budget": "70%", "codec": "0=bf16,1=int4"},
    "fastgen": {"method": "fastgen", "options": RULES},
    "fastgen 40%": {"method": "fastgen", "budget": "40%", "options": RULES},
}


class Course(NamedTuple):
    """What an engine did with some requests."""

    ends: Outcome
    followed: int
    preempted: int
    steps: int
    waits: int  #: steps in which the newest work was waited for
    counts: Counter[str]  #: what was asked of the device
    coded: int  #: steps behind the first ones in which entries were quantized


def ask(length: int, new: int, name: str | None = None, **params: Any) -> Request:
    prompt = tuple(test_codecs.prompt(length))
    return Request(request_id=name or str(length), prompt=prompt, params=greedy(new, **params))


def tables(engine: Engine) -> Iterator[PageTable]:
    """Those of the caches that decode."""
    caches = {id(state.group.batch_cache): state.group.batch_cache for state in engine._requests}
    for batch_cache in caches.values():
        for layer_cache in batch_cache.layers:
            if layer_cache.table is not None and layer_cache.table.n_seq:
                yield layer_cache.table


def course(case: str, requests: list[Request], *, apart: bool, ahead: bool = True, **options: Any) -> Course:
    """Run requests to their ends; with memory apart, each step is compared with what the device holds."""
    ends: Outcome = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_runs_ahead", ahead)
        counts = set_apart(patch) if apart else Counter[str]()
        coded, real = Counter[int](), QuantizedStore.write_all

        def write_all(self: QuantizedStore, *given: Any) -> None:
            coded[steps] += 1
            real(self, *given)

        patch.setattr(QuantizedStore, "write_all", write_all)
        waits = steps = 0
        engine = Engine(test_codecs.model(), **CASES[case], **{"page_slots": 16, **options})
        for request in requests:
            engine.add(request)
        while engine.busy:
            before = counts["lengths"] + counts["tombstones"]
            ends |= {output.request_id: outcome_of(output) for output in engine.step() if output.finished}
            steps += 1
            waits += counts["lengths"] + counts["tombstones"] > before
            for table in tables(engine) if apart else ():
                check_pages(table, falls=case.startswith("fastgen"))
        engine.check_integrity()
        stats, followed = engine.stats(), engine._ahead.n_followed
        engine.close()
    return Course(ends, followed, stats.preemptions, steps, waits, counts, sum(step > 4 for step in coded))


@pytest.mark.parametrize("case", CASES)
def test_a_long_answer_is_the_same_and_hardly_waits(case: str) -> None:
    """The host waits where entries are quantized or an answer ends, or nearly fill a page for codes and may or may not.

    The last is rare of a method that keeps new entries, whose victims lie among the codes.
    """
    requests = [ask(210, 220), ask(150, 240), ask(90, 200)]
    here = course(case, requests, apart=False)
    there = course(case, requests, apart=True)
    assert there.ends == here.ends
    assert there.followed == here.followed > 200
    assert there.coded == here.coded
    assert there.coded > 4 or case in ("h2o int4", "h2o by layer") or "fastgen" in case
    ended = len(requests)
    assert there.waits <= (there.steps // 4 if case in ("tova flexgen4", "random fp8") else ended + there.coded)
    assert 0 < there.counts["looks"] < there.steps * 2  # of two layers


@pytest.mark.parametrize("case", ["h2o fp8", "tova flexgen4", "fastgen"])
def test_steps_that_do_not_run_ahead(case: str) -> None:
    requests = [ask(150, 60), ask(90, 70)]
    here = course(case, requests, apart=False)
    there = course(case, requests, apart=True, ahead=False)
    assert there.followed == 0
    assert there.ends == here.ends


@pytest.mark.parametrize("case", ["h2o fp8", "fastgen"])
def test_the_size_of_a_cache_is_that_behind_the_last_token(case: str) -> None:
    """Not that of the step that was launched before the last token of an answer was read."""
    said = {name: end[0][0] for name, end in course(case, [ask(150, 60), ask(90, 70)], apart=False).ends.items()}
    last = {name: max(answer[:-1], key=answer.index) for name, answer in said.items()}
    requests = [ask(150, 60, stop_token_ids=(last["150"],)), ask(90, 70, stop_token_ids=(last["90"],))]
    here = course(case, requests, apart=False, ahead=False)
    there = course(case, requests, apart=True)
    assert {end[0][2] for end in there.ends.values()} == {"stop"}
    assert there.ends == here.ends


@pytest.mark.parametrize("slots", [4, 64])
@pytest.mark.parametrize("case", ["random fp8", "fastgen 40%"])
def test_pages_of_any_size(case: str, slots: int) -> None:
    requests = [ask(150, 90), ask(90, 100)]
    here, there = (course(case, requests, apart=apart, page_slots=slots) for apart in (False, True))
    assert there.ends == here.ends


@pytest.mark.parametrize("case", ["h2o fp8", "random fp8", "fastgen"])
def test_a_request_needs_no_more_than_it_is_said_to(case: str) -> None:
    """Bounds take pages early, and none beyond those that the request may come to need."""
    with pytest.raises(BudgetError, match="may need") as refused:
        course(case, [ask(150, 200)], apart=True, kv_memory=200_000, page_slots=4)
    said = re.search(r"may need ([\d,]+) bytes", str(refused.value))
    assert said is not None
    there = course(case, [ask(150, 200)], apart=True, kv_memory=int(said[1].replace(",", "")), page_slots=4)
    assert len(there.ends["150"][0][0]) == 200
    assert there.followed == 198


@pytest.mark.parametrize(("case", "memory"), [("h2o fp8", 700_000), ("fastgen", 1_000_000)])
def test_preempted_answers_are_the_same(case: str, memory: int) -> None:
    requests = [ask(length, 110, f"{length} {n}") for n in range(2) for length in (150, 120, 90)]
    plain = course(case, requests, apart=False)
    there = course(case, requests, apart=True, kv_memory=memory, overcommit=4.0)
    assert there.preempted > 0
    assert {name: [one[0] for one in end] for name, end in there.ends.items()} == {
        name: [one[0] for one in end] for name, end in plain.ends.items()
    }
