"""Answers whose first tokens are known: they are fed behind the planned prompt, and what follows is as it would be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError
from tests.helpers.engine.helpers import budget_of, engine_for, prompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens
NEW = 14


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = engine_for("h2o")
    yield made
    made.close()


def answer(engine: Engine, request: Request) -> RequestOutput:
    engine.add(request)
    (found,) = engine.drain()
    engine.check_integrity()
    return found


def request(method: str, **params: Any) -> Request:
    chosen = mp.SamplingParams(**{"max_tokens": NEW, "temperature": 0.8, "seed": 3, "ignore_eos": True} | params)
    cache = CacheOptions(method=method, budget=budget_of(method))
    return Request(request_id="one", prompt=prompt(57), params=chosen, cache=cache)


@pytest.mark.parametrize("method", ["full", "h2o", "snapkv", "streaming"])
@pytest.mark.parametrize("n_known", [9, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, NEW))])
def test_what_follows_known_tokens_is_what_followed_them(engine: Engine, method: str, n_known: int) -> None:
    asked = request(method)
    (expected,) = answer(engine, asked).completions
    (found,) = answer(engine, replace(asked, known=(expected.token_ids[:n_known],))).completions
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason


def test_known_tokens_are_fed_and_not_chosen(engine: Engine) -> None:
    asked = request("full", temperature=0, logprobs=0)
    (expected,) = answer(engine, asked).completions
    other = tuple((token + 1) % 90 + 3 for token in expected.token_ids[:6])
    (found,) = answer(engine, replace(asked, known=(other,))).completions
    assert found.token_ids[:6] == other
    assert found.token_ids[6:] != expected.token_ids[6:]
    assert found.logprobs is not None
    assert found.logprobs[0].logprob < expected.logprobs[0].logprob  # type: ignore[index]


def test_each_of_several_answers_has_its_own(engine: Engine) -> None:
    asked = request("h2o", n=2, repetition_penalty=1.2, logprobs=1)
    expected = answer(engine, asked).completions
    known = (expected[0].token_ids[:7], expected[1].token_ids[:2])
    found = answer(engine, replace(asked, known=known)).completions
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert [one.logprob for one in a.logprobs] == pytest.approx([one.logprob for one in b.logprobs], abs=1e-4)


def test_a_request_moves_while_it_is_fed(engine: Engine) -> None:
    other = engine_for("h2o", page_slots=8)
    asked = request("snapkv")
    (expected,) = answer(engine, asked).completions
    engine.add(replace(asked, known=(expected.token_ids[:9],)))
    while True:
        found = engine.step()
        if found and len(found[0].completions[0].token_ids) == 3:
            break
    other.import_request(engine.export_request("one"))
    (moved,) = other.drain()
    assert moved.completions[0].token_ids == expected.token_ids
    other.close()


@pytest.mark.parametrize(
    ("known", "rule"),
    [
        (((3,), (4,)), "known has tokens of 2 answers, and n=1"),
        (((3,) * 15,), "known has 15 tokens of an answer of at most 14"),
        (((3, 96),), "token id 96 is not one of"),
    ],
)
def test_known_tokens_that_no_answer_has(engine: Engine, known: tuple[tuple[int, ...], ...], rule: str) -> None:
    with pytest.raises(OptionError, match=rule):
        engine.add(replace(request("full"), known=known))
    assert not engine.busy
