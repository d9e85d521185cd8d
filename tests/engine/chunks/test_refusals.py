"""Prompts, options and models that a chunk store refuses."""

from __future__ import annotations

from typing import Any

import pytest

import millpond as mp
from millpond.cache.chunks.store import ChunkStore
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError, UnsupportedModelError
from tests.helpers.engine.chunked import PROMPTS, QUESTION, A, ask, chunked, engine
from tests.helpers.engine.helpers import greedy
from tests.helpers.hf.families import family, shared_model

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"recompute": 1.5}, "recompute=1.5 must be"), ({"pick": "heads"}, "unknown pick 'heads'; did you mean 'head'")],
)
def test_options_out_of_range(options: dict[str, Any], words: str) -> None:
    of = engine()
    with pytest.raises(OptionError, match=words):
        of.add(Request(request_id="x", prompt=PROMPTS["ab"], cache=CacheOptions(**options)))
    of.close()


def test_chunks_without_a_store() -> None:
    of = Engine(shared_model("llama"), method="full")
    with pytest.raises(OptionError, match="the engine has no chunk store"):
        of.add(Request(request_id="x", prompt=PROMPTS["ab"]))
    assert len(ask(of, chunked(A, QUESTION)).prompt_token_ids) == len(A) + len(QUESTION), "no chunk, no store"
    of.close()


def test_log_probabilities_of_a_prompt_need_all_of_it() -> None:
    of = engine()
    with pytest.raises(OptionError, match="prompt_logprobs need every token"):
        of.add(Request(request_id="x", prompt=PROMPTS["ab"], params=greedy(2, prompt_logprobs=0)))
    of.close()


def test_a_chunk_that_no_tier_can_hold() -> None:
    of = engine(store=ChunkStore(None, memory="1kB"))
    with pytest.raises(OptionError, match=r"a chunk of 23 tokens takes [\d,]+ bytes and the chunk store holds 1,000"):
        of.add(Request(request_id="x", prompt=PROMPTS["ab"], params=greedy(2)))
    of.close()


@pytest.mark.parametrize(("name", "why"), [("opt", "no rotary position embedding"), ("gpt2", "no rotary")])
def test_models_without_rotation_are_refused(name: str, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        Engine(shared_model(name), method="full", chunk_store=ChunkStore(None))


def test_models_whose_frequencies_follow_the_length_are_refused() -> None:
    model = family("llama").make(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match="more than its own position"):
        Engine(model, method="full", chunk_store=ChunkStore(None))


def test_deviation_needs_the_lean_runner() -> None:
    of = engine(runner="modules")
    with pytest.raises(OptionError, match='pick="deviation" compares keys of the second layer'):
        of.add(Request(request_id="x", prompt=PROMPTS["ab"], cache=CacheOptions(pick="deviation")))
    of.close()


@pytest.mark.parametrize("parts", ["a text", [], [3], [mp.Chunk("x"), None], 7])
def test_what_is_no_prompt(parts: Any) -> None:
    with pytest.raises(OptionError):
        mp.Prompt(parts)


@pytest.mark.parametrize("content", ["", (), (True,), 3])
def test_what_is_no_chunk(content: Any) -> None:
    with pytest.raises(OptionError):
        mp.Chunk(content)
