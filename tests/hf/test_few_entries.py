"""Budgets of few entries: what holds where none is given, and what is said where a stated one keeps little."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import millpond as mp
from millpond.budget import DEFAULT
from millpond.engine.llm import LLM
from millpond.engine.request import CacheOptions
from millpond.engine.sampling.params import SamplingParams
from millpond.hf.layer_budgets import FewEntriesWarning
from millpond.models.load import load_model, load_tokenizer
from tests.cli.test_cli import right
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.models import REAL, needs_real_model


def kept(length: int, method: str, budget: str | int | None) -> int:
    """Entries per head after a prompt of `length` tokens."""
    with torch.no_grad(), mp.compress(llama(), method, budget) as cache:
        llama()(prompts(1, length)[0], cache=cache)
        (found,) = {n for layer in cache.stats().stored for row in layer for n in row}
    return found


def test_without_a_budget_a_short_prompt_stays_whole() -> None:
    assert kept(60, "h2o", None) == 60
    assert kept(60, "h2o", "20%") == 12


def test_every_door_has_the_same_default(tmp_path: Path) -> None:
    with mp.compress(llama(), "h2o") as cache:
        assert cache.budget == DEFAULT
        assert cache.settings is not None
        assert mp.Budget(*cache.settings["budget"]) == DEFAULT
    with LLM(llama(), method="h2o") as llm:
        assert llm.engine.cache.budget == DEFAULT
        assert llm.engine._parts.decode_groups.group(CacheOptions(method="ada")).cache_factory.budget == DEFAULT
    assert mp.Budget.parse(mp.preset("tiny")["budget"]) == DEFAULT
    text = "go on and off past stone " * 20
    told = right("generate", "--prompt", text, "--max-new-tokens", "1", "--method", "h2o").output
    assert "of it in unfilled pages, full cache" in told
    assert int(told.rsplit("(", 1)[1].split("%")[0]) >= 100
    document = str(tmp_path / "text.kv")
    right("remember", document, "--prompt", text, "--method", "h2o")
    with mp.restore_document(load_model("pond-recall"), document)[0] as restored:
        assert restored.budget == DEFAULT


@pytest.mark.parametrize(
    ("method", "budget", "length", "message"),
    [
        ("h2o", "20%", 100, "budget 20%: of 100 tokens 20 entries per KV head stay, so few"),
        ("snapkv", 40, 100, "budget 40 tokens: of 100 tokens 40 entries"),
        ("window", "10%", 100, "budget 10%: of 100 tokens 10 entries"),
        ("h2o", 8, 100, "of 8 entries per KV head 4 are sinks and the rest the newest, so that the method's score"),
        ("snapkv", 32, 100, "of 32 entries per KV head 0 are sinks and the rest the newest"),
    ],
)
def test_few_entries_are_told_of_once(method: str, budget: str | int, length: int, message: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad(), mp.compress(llama(), method, budget) as cache:
            for _ in range(2):
                llama()(prompts(1, length)[0], cache=cache)
    few = [str(w.message) for w in caught if issubclass(w.category, FewEntriesWarning)]
    assert len(few) == 1
    assert few[0].startswith(message)


@pytest.mark.parametrize(("method", "budget", "length"), [("h2o", "80%", 100), ("h2o", 12, 10), ("h2o", None, 100)])
def test_nothing_is_said_where_enough_stays(method: str, budget: str | int | None, length: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept(length, method, budget)


def test_the_engine_tells_of_few_entries_too() -> None:
    with LLM(llama(), method="h2o", budget="20%") as llm, pytest.warns(FewEntriesWarning, match="20 entries"):
        llm.generate([list(range(2, 52)) * 2], SamplingParams(max_tokens=2))


@needs_real_model
def test_a_real_model_answers_as_with_the_full_cache() -> None:
    assert REAL is not None
    model, tokenizer = load_model(REAL, "f32"), load_tokenizer(REAL)  # in bf16 the first two tokens are a tie
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answers = []
    for method in ("full", "h2o"):
        with mp.compress(model, method) as cache:
            out = model.generate(**ids, cache=cache, max_new_tokens=16, do_sample=False)  # type: ignore[operator]
        answers.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    assert "Paris" in answers[0]
    assert answers[1] == answers[0]
