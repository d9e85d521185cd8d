"""EngineConfig: one set of settings for LLM, AsyncLLM and Engine, checked before a model is loaded."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond import cluster
from millpond.cluster.settings import ClusterSettings
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.options import LoadOptions
from millpond.engine.options import ClusterOptions, EngineOptions, LLMOptions
from millpond.errors import BudgetError, OptionError
from millpond.setting import settings_of
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
    ({"page_slots": 0}, OptionError, "page_slots=0 must be at least 1"),
    ({"runner": "leen"}, OptionError, "did you mean 'lean'"),
    ({"overflow": "roling"}, OptionError, "did you mean 'rolling'"),
    ({"max_running": "many"}, OptionError, "max_running='many' must be a whole number, at least 1"),
    ({"max_running": 1.5}, OptionError, "max_running=1.5 must be a whole number, at least 1"),
    ({"max_model_len": 0}, OptionError, "at least 1, or be left out for the default: the model's context"),
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
    engine = {field.name: field.type for field in fields(EngineConfig)}
    for options, *others in ((EngineOptions,), (LLMOptions, LoadOptions), (ClusterOptions, ClusterSettings)):
        types = engine | {field.name: field.type for kind in others for field in fields(kind)}
        assert {name: one.__forward_arg__ for name, one in options.__annotations__.items()} == types
    assert "kv_memory" in inspect.signature(cluster.generate_dataset).parameters
    assert str(cluster.generate_dataset.__doc__).startswith("Answer the rows of a dataset")
    loading = {field.name for field in fields(LoadOptions)}
    for door in (mp.LLM, mp.AsyncLLM, Engine, cluster.LLM, cluster.AsyncLLM):
        shown = inspect.signature(door).parameters
        assert {field.name for field in fields(EngineConfig)} < set(shown)
        assert (loading < set(shown)) == (door in (mp.LLM, mp.AsyncLLM))
        assert ("replicas" in shown) == (door in (cluster.LLM, cluster.AsyncLLM))
        assert "kv_memory: Limit of the memory" in str(door.__init__.__doc__)
        assert shown["kv_memory"].default is None
        assert shown["max_step_tokens"].default == 512


@pytest.mark.parametrize("kind", [EngineConfig, LoadOptions, ClusterSettings])
def test_every_field_says_what_it_means(kind: type) -> None:
    assert list(settings_of(kind)) == [field.name for field in fields(kind)]
    for one in settings_of(kind).values():
        assert one.help.endswith(".")


def test_keyword_arguments_take_the_place_of_the_config_s_values() -> None:
    config = EngineConfig(method="window", budget=32, kv_memory="1MiB")
    with mp.LLM(tiny_model(), config, budget=16) as llm:
        assert llm.engine.config == replace(config, budget=16)
        assert llm.engine.cache.method == "window"
        assert llm.stats().kv_limit == 2**20
    with mp.LLM(tiny_model(), config) as llm:
        assert llm.engine.config is config


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"LLM\(\) takes no option 'kv_memry'; did you mean 'kv_memory'"):
        mp.LLM("no-such-model", kv_memry="1MiB")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"AsyncLLM\(\) takes no option 'memry'; did you mean 'memory'"):
        mp.AsyncLLM("no-such-model", memry="1MiB")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"EngineConfig\(\) takes no option 'kv_memry'; did you mean 'kv_memory'"):
        Engine(None, kv_memry="1MiB")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"ClusterLLM\(\) takes no option 'replica'; did you mean 'replicas'"):
        cluster.LLM("no-such-model", replica=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["duo_attention", "pyramidkv"])
def test_files_of_options_are_read_once(method: str, tmp_path: Path) -> None:
    heads = tmp_path / "heads.json"
    heads.write_text("[[1, 0], [0, 1]]", encoding="utf-8")
    named = {"duo_attention": {"heads": str(heads)}, "pyramidkv": {"score": f"duo_attention/heads={heads}"}}
    config = EngineConfig(method=method, options=named[method])
    heads.unlink()
    again = replace(config, max_step_tokens=8)
    assert again.options == config.options == named[method]
