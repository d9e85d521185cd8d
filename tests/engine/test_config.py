"""EngineConfig: one set of settings for LLM, AsyncLLM and Engine, checked before a model is loaded."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.engine.config import EngineConfig, EngineOptions
from millpond.engine.engine import Engine
from millpond.errors import BudgetError, OptionError
from tests.helpers.evals.small import tiny_model

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"method": "h20"}, OptionError, "did you mean 'h2o'"),
    ({"options": {"recnt": 1}}, OptionError, "did you mean 'recent'"),
    ({"budget": "20 percent"}, BudgetError, "percent"),
    ({"method": "full", "budget": 8}, BudgetError, "takes no budget"),
    ({"codec": "int5"}, OptionError, "int5"),
    ({"kv_memory": "much"}, BudgetError, "much"),
    ({"max_step_tokens": 0}, OptionError, "max_step_tokens=0 must be at least 1"),
    ({"overcommit": float("nan")}, OptionError, "overcommit=nan must be at least 1"),
    ({"page_slots": 12}, OptionError, "page_slots=12 must be a power of two"),
    ({"runner": "leen"}, OptionError, "did you mean 'lean'"),
]


@pytest.mark.parametrize(("given", "kind", "message"), WRONG)
def test_a_wrong_value_is_refused_before_a_model_is_loaded(
    given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        EngineConfig(**given)
    for door in (mp.LLM, mp.AsyncLLM):
        with pytest.raises(kind, match=message):
            door("no-such-model", **given)
    with pytest.raises(kind, match=message):
        Engine(None, **given)


def test_keyword_arguments_are_the_fields_of_the_config() -> None:
    assert EngineOptions.__annotations__.keys() == {field.name for field in fields(EngineConfig)}
    types = {field.name: field.type for field in fields(EngineConfig)}
    assert {name: one.__forward_arg__ for name, one in EngineOptions.__annotations__.items()} == types
    for door in (mp.LLM, mp.AsyncLLM, Engine):
        shown = inspect.signature(door).parameters
        assert {field.name for field in fields(EngineConfig)} < set(shown)
        assert shown["kv_memory"].default is None
        assert shown["max_step_tokens"].default == 512


def test_keyword_arguments_take_the_place_of_the_config_s_values() -> None:
    config = EngineConfig(method="window", budget=32, kv_memory="1MiB")
    with mp.LLM(tiny_model(), config, budget=16) as llm:
        assert llm.engine.config == replace(config, budget=16)
        assert llm.engine.cache.method == "window"
        assert llm.stats().kv_limit == 2**20
    with mp.LLM(tiny_model(), config) as llm:
        assert llm.engine.config is config


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match="kv_memry"):
        mp.LLM("no-such-model", kv_memry="1MiB")  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["duo_attention", "pyramidkv"])
def test_files_of_options_are_read_once(method: str, tmp_path: Path) -> None:
    heads = tmp_path / "heads.json"
    heads.write_text("[[1, 0], [0, 1]]", encoding="utf-8")
    named = {"duo_attention": {"heads": str(heads)}, "pyramidkv": {"score": f"duo_attention/heads={heads}"}}
    config = EngineConfig(method=method, options=named[method])
    heads.unlink()
    again = replace(config, max_step_tokens=8)
    assert again.options == config.options == named[method]
