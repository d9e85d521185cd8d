"""Methods over other methods take options of the one they build on, through every door."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import millpond as mp
from millpond.engine.llm import LLM
from millpond.engine.request import CacheOptions
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.methods._base import base_spec
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import WindowAttention
from millpond.server.schemas import CacheFields
from millpond_lab.evals.candidates.candidate import find_candidate
from millpond_lab.evals.spec import Spec
from tests.cli.test_cli import right
from tests.helpers.matrix.models import llama

WRAPPERS = [name for name in METHODS.names() if "score" in METHODS.get(name).options]
OPTIONS: dict[str, dict[str, Any]] = {"layer_table": {"table": "3;1"}}


def pools(part: Any) -> set[tuple[str, int, int]]:
    """Pool, kernel and window of every window score inside a policy."""
    if isinstance(part, WindowAttention):
        return {(part.pool, part.kernel, part.window)}
    if isinstance(part, tuple):
        return {found for one in part for found in pools(one)}
    return {found for f in fields(part) for found in pools(getattr(part, f.name))} if is_dataclass(part) else set()


def wrapped(name: str, score: str) -> Policy:
    return METHODS.get(name)(score=score, **OPTIONS.get(name, {}))


def test_the_methods_that_wrap_another_are_known() -> None:
    assert {"ada", "chunkkv", "criticalkv", "dms", "merge_on_evict", "pyramidkv", "simlayerkv"} <= set(WRAPPERS)


@pytest.mark.parametrize("name", WRAPPERS)
def test_options_of_the_base_reach_it(name: str) -> None:
    assert pools(wrapped(name, "snapkv/pool=avg/kernel=5/window=9")) == {("avg", 5, 9)}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("snapkv/pol=avg", "unknown option of snapkv 'pol'"),
        ("snapkv/pool=mean", "pool='mean' must be one of"),
        ("snapkv/avg", "must read name or name/option=value"),
        ("snapkv/pool=avg/pool=max", "gives 'pool' twice"),
        ("snapkw", "unknown method 'snapkw'"),
    ],
)
def test_what_no_base_takes_is_refused(name: str, score: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        wrapped(name, score)


def test_a_slash_inside_a_value_begins_no_option() -> None:
    text = "duo_attention/heads=some/folder/heads.json/sinks=4"
    assert base_spec("ada", text) == ("duo_attention", {"heads": "some/folder/heads.json", "sinks": "4"})
    assert base_spec("ada", "criticalkv/first=0.5/score=snapkv/pool=avg") == (
        "criticalkv",
        {"first": "0.5", "score": "snapkv/pool=avg"},
    )


def test_every_door_takes_them() -> None:
    options: dict[str, Any] = {"score": "snapkv/pool=avg/window=4"}
    wanted = {("avg", 21, 4)}
    with mp.compress(llama(), "criticalkv", 8, **options) as cache:
        assert pools(cache.policy) == wanted
    candidate: Any = find_candidate(Spec.parse("criticalkv:score=snapkv/pool=avg/window=4"))
    assert pools(METHODS.get("criticalkv")(**candidate.options)) == wanted
    asked = CacheFields(method="criticalkv", budget=8, options=options)
    with LLM(llama()) as llm:
        (out,) = llm.generate(
            [list(range(2, 34))],
            SamplingParams(max_tokens=3),
            cache=CacheOptions(method=asked.method, budget=asked.budget, options=asked.options),
        )
    assert len(out.completions[0].token_ids) == 3


def test_the_command_line_takes_them() -> None:
    command = ["generate", "--method", "criticalkv", "--prompt", "a b c", "--max-new-tokens", "1"]
    right(*command, "-o", "score=snapkv/pool=avg/window=4")
