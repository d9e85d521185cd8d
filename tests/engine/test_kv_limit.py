"""kv_memory: an engine begins with no less than a request of one token takes, and runs one with exactly that."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import millpond as mp
from millpond.engine.engine import Engine
from tests.engine import test_codecs
from tests.engine.test_codecs import CASES
from tests.helpers.engine.helpers import METHODS, add, ask, engine_for, finish, greedy, shared_model


def least(open_engine: Callable[..., Engine]) -> int:
    """The least that the error names of a limit of one byte."""
    with pytest.raises(mp.BudgetError, match=r"kv_memory=1 bytes holds no request") as refused:
        open_engine(kv_memory=1)
    named = re.search(r"give ([\d,]+) or more", str(refused.value))
    assert named is not None
    return int(named[1].replace(",", ""))


def runs_with_the_least(open_engine: Callable[..., Engine]) -> None:
    limit = least(open_engine)
    with pytest.raises(mp.BudgetError, match=f"kv_memory={limit - 1:,} bytes holds no request"):
        open_engine(kv_memory=limit - 1)
    engine = open_engine(kv_memory=limit)
    add(engine, ask(1, greedy(1)))
    (output,) = finish(engine).values()
    engine.close()
    assert (output.error, len(output.completions[0].token_ids)) == (None, 1)


@pytest.mark.in_turns(0, of=3)
@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str) -> None:
    runs_with_the_least(lambda **limit: engine_for(method, **limit))


@pytest.mark.in_turns(1, of=3)
@pytest.mark.parametrize("case", CASES)
def test_formats(case: str) -> None:
    runs_with_the_least(lambda **limit: test_codecs.engine_for(case, **limit))


def test_warnings_are_those_of_requests() -> None:
    engine = engine_for("h2o", kv_memory="1MiB")  # 30% of one token is less than the method protects
    with pytest.warns(UserWarning, match="of a prompt of 1 tokens"):
        engine.add(ask(1))
    engine.close()


@pytest.mark.parametrize("settings", [{}, {"method": "h2o", "budget": "20%"}, {"prefix_cache": True}])
def test_before_any_request(settings: dict[str, Any]) -> None:
    model = shared_model("llama")
    before = model.config._attn_implementation  # of an engine of another test, where one is still open
    with pytest.raises(mp.BudgetError, match=r"kv_memory=1,024 bytes holds no request.*or leave kv_memory out"):
        mp.LLM(model, kv_memory="1KiB", **settings)
    assert model.config._attn_implementation == before
