"""What answers tell of forgotten spans of their prompts: against the caches of `generate`."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.outputs import Forgotten
from millpond.errors import OptionError
from millpond.prompt_marks import PromptMarks
from tests.helpers.engine.helpers import METHODS, NEW, ask, budget_of, engine_for, finish, greedy, prompt
from tests.helpers.hf.families import family, generate, shared_model

LENGTH = 57
SPANS = ((0, 4), (4, 30), (30, 30), (20, LENGTH), (0, LENGTH))


def expected(method: str, codec: str = "auto", new: int = NEW, model: Any = None) -> list[Forgotten]:
    """Counted one by one in the cache that `generate` leaves."""
    ids = torch.tensor([prompt(LENGTH)])
    holders: dict[int, int] = dict.fromkeys(range(LENGTH + new), 0)
    heads, model = 0, model or shared_model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        with mp.compress(model, method, budget_of(method), codec, page_slots=4, **METHODS[method]) as kept:
            generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, new, cache=kept)
            for layer_cache in kept.layer_caches:
                for row in layer_cache.read(0).positions.tolist():
                    heads += 1
                    for position in row:
                        if position >= 0:
                            holders[position] += 1
    found = []
    for begin, end in SPANS:
        own = [holders[position] for position in range(begin, end)]
        n = max(len(own), 1)
        part = sum(own) / (n * heads) if own else 1.0
        found.append(Forgotten(begin, end, own.count(0) / n, sum(2 * of < heads for of in own) / n, part))
    return found


def told(engine: Engine, **more: Any) -> list[tuple[Forgotten, ...]]:
    for length in (40, 31):
        engine.add(ask(length))
    engine.add(ask(LENGTH, name="told", marks=PromptMarks(report=SPANS), **more))
    done = finish(engine)
    engine.close()
    assert all(one.forgotten == () for one in done["40"].completions)
    return [one.forgotten for one in done["told"].completions]


@pytest.mark.in_turns(0, of=2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "method", ["full", "h2o", "snapkv", "ada", "streaming", "tova", "window", "pyramidkv", "kvmerger", "cam", "random"]
)
def test_it_is_what_the_cache_lacks_at_the_end(method: str) -> None:
    (found,) = told(engine_for(method))
    assert list(found) == [pytest.approx(one) for one in expected(method)]
    if method == "full":
        assert {(one.share, one.fewer_than_half) for one in found} == {(0.0, 0.0)}
    else:
        assert found[-1].fewer_than_half > 0.3


@cache
def wide() -> Any:
    """A model whose heads are wide enough for codes."""
    return family("llama").make(head_dim=32, hidden_size=64)


def coded_engine(method: str) -> Engine:
    return Engine(
        wide(), method=method, budget=budget_of(method), codec="rotated4", max_step_tokens=16, prefix_cache=False
    )


def test_codes_are_held_too() -> None:
    (found,) = told(coded_engine("full"))
    assert {(one.share, one.fewer_than_half) for one in found} == {(0.0, 0.0)}
    (found,) = told(coded_engine("h2o"))
    assert list(found) == [pytest.approx(one) for one in expected("h2o", "rotated4", model=wide())]


@pytest.mark.parametrize("new", [1, 2])
def test_every_answer_tells_however_short(new: int) -> None:
    found = told(engine_for("h2o"), params=greedy(new, n=2))
    assert len(found) == 2
    if new == 2:
        assert [list(one) for one in found] == [[pytest.approx(of) for of in expected("h2o", new=2)]] * 2
    else:  # it ended before anything left
        assert {(of.share, of.fewer_than_half) for one in found for of in one} == {(0.0, 0.0)}


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_nothing_is_told_of_a_prompt_that_was_not_read(steps: int) -> None:
    engine = engine_for("h2o")
    engine.add(ask(LENGTH, name="told", marks=PromptMarks(report=SPANS)))
    for _ in range(steps):
        engine.step()
    engine.cancel("told")
    assert [one.completions[0].forgotten for one in engine.drain()] == [()]
    engine.close()


def test_an_answer_that_is_cut_off_tells_too() -> None:
    engine = engine_for("h2o")
    engine.add(ask(LENGTH, name="told", marks=PromptMarks(report=SPANS)))
    for _ in range(8):
        engine.step()
    engine.cancel("told")
    (cut,) = engine.drain()
    assert cut.completions[0].finish_reason == "cancelled"
    assert cut.completions[0].forgotten[-1].fewer_than_half > 0.3
    engine.close()


@pytest.mark.parametrize(
    ("spans", "match"),
    [
        (((0, LENGTH + 1),), "must lie in the prompt"),
        (((-1, 3),), "is no span"),
        (((5, 4),), "is no span"),
        (((0, 1),) * 5000, "5000 spans"),
    ],
)
def test_bad_spans_are_refused(spans: Any, match: str) -> None:
    engine = engine_for("h2o")
    with pytest.raises(OptionError, match=match):
        engine.add(ask(LENGTH, marks=PromptMarks(report=spans)))
    engine.close()


def test_a_request_that_moves_takes_its_spans_along() -> None:
    here, there = engine_for("h2o"), engine_for("h2o")
    here.add(ask(LENGTH, name="told", marks=PromptMarks(report=SPANS)))
    while not (found := here.step()) or len(found[0].completions[0].token_ids) < 3:
        pass
    there.import_request(here.export_request("told"))
    (done,) = there.drain()
    assert list(done.completions[0].forgotten) == [pytest.approx(one) for one in expected("h2o")]
    here.close()
    there.close()
