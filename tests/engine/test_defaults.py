"""Where nobody says how a cache is kept nothing is evicted; shares of short prompts have a floor in servers."""

from __future__ import annotations

from typing import Any

import pytest

import millpond as mp
from millpond.budget import Budget
from millpond.engine.config import EngineConfig
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError
from millpond.presets import Choice, choose
from tests.helpers.hf.families import shared_model

PROMPT = [5 + n % 200 for n in range(300)]
SHORT = mp.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(
    ("method", "budget", "codec", "preset", "evicting", "picked"),
    [
        (None, None, None, None, False, ("full", None, "int8", True)),
        (None, None, "auto", None, False, ("full", None, "int8", True)),
        (None, "20%", None, None, False, ("h2o", "20%", "auto", False)),
        (None, None, None, None, True, ("h2o", None, "auto", False)),
        (None, None, "int4", None, False, ("full", None, "int4", False)),
        ("snapkv", None, None, None, False, ("snapkv", None, "auto", False)),
        (None, None, None, "tiny", False, ("ada", "20%, at least 512", "rotated4", False)),
    ],
)
def test_what_is_chosen(
    method: Any, budget: Any, codec: Any, preset: str | None, evicting: bool, picked: tuple[Any, ...]
) -> None:
    assert choose(method, budget, codec, preset, evicting) == Choice(*picked)


@pytest.mark.parametrize("given", [{"method": "h2o"}, {"budget": "20%"}, {"codec": "int4"}])
def test_a_preset_decides_alone(given: dict[str, str]) -> None:
    model = shared_model("llama")
    with pytest.raises(OptionError, match="decides the"):
        mp.compress(model, preset="light", **given)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="decides the"):
        EngineConfig(preset="light", **given)  # type: ignore[arg-type]


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'balanced'"):
        mp.compress(shared_model("llama"), preset="balancd")


def test_compress_evicts_nothing_by_default() -> None:
    with mp.compress(mp.load_model("pond-recall")) as cache:
        assert cache.budget is None
        assert cache.settings is not None
        assert (cache.settings["method"], cache.settings["codec"]) == ("full", "int8")


def test_a_preset_is_its_parts() -> None:
    with mp.compress(shared_model("llama"), preset="tiny") as cache:
        assert cache.settings is not None
        assert (cache.settings["method"], cache.settings["codec"]) == ("ada", "rotated4")


def test_an_engine_evicts_nothing_by_default() -> None:
    with mp.LLM("pond-recall") as llm:
        assert (llm.engine.cache.method, llm.engine.cache.codec) == ("full", "int8")
        (output,) = llm.generate([PROMPT], SHORT)
        kv = output.outputs[0].kv
        assert kv is not None
        assert kv.evicted == 0


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"budget": "20%"}, ("h2o", "auto")),
        ({"method": "snapkv", "budget": 64}, ("snapkv", "auto")),
        ({"codec": "int4"}, ("full", "int4")),
        ({"method": "h2o", "budget": 64, "codec": "int4"}, ("h2o", "int4")),
        ({}, ("full", "int8")),
    ],
)
def test_a_request_that_names_something_has_that_and_no_default_format(
    asked: dict[str, Any], kept: tuple[str, str]
) -> None:
    with mp.LLM("pond-recall") as llm:
        found = llm.engine._parts.decode_groups.complete(CacheOptions(**asked))
    assert (found.method, found.codec) == kept


def test_named_defaults_hold_for_requests() -> None:
    with mp.LLM("pond-recall", method="full", codec="int4") as llm:
        assert llm.engine._parts.decode_groups.complete(CacheOptions(method="h2o", budget=64)).codec == "int4"


@pytest.mark.parametrize(
    ("budget", "floor", "kept"),
    [("20%", 512, 300), ("20%", 0, 60), ("20%, at least 70", 512, 70), (64, 512, 64), ("50%", 100, 150)],
)
def test_a_share_keeps_at_least_the_floor(budget: str | int, floor: int, kept: int) -> None:
    with mp.LLM("pond-recall", method="snapkv", budget=budget, budget_floor=floor) as llm:
        llm.engine.add(Request(request_id="a", prompt=tuple(PROMPT), params=SHORT))
        while not (outputs := llm.engine.step()) or not outputs[0].completions[0].token_ids:
            pass
        kv = outputs[0].completions[0].kv
        assert kv is not None
        assert round(kv.held) == kept
        llm.engine.cancel("a")


def test_a_floor_is_for_shares_that_say_none() -> None:
    assert str(Budget.parse("20%").floored(512)) == "20%, at least 512"
    assert Budget.parse("20%, at least 64").floored(512) == Budget.parse("20%, at least 64")
    assert Budget.parse(100).floored(512) == Budget.parse(100)
    with pytest.raises(OptionError, match="budget_floor=-1 must be at least 0"):
        EngineConfig(budget_floor=-1)
