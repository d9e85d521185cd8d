"""Layers that share keys in the engine: each request answers as `generate` does alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import millpond as mp
from millpond.bench.model_types.tiny_model import tiny_model
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import CacheOptions, Request
from tests.helpers.engine.helpers import add, finish, greedy, prompt, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.FewEntriesWarning"),
    pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning"),
]
TYPES = ["gemma3n_text", "gemma4_text", pytest.param("gemma4_unified_text", marks=pytest.mark.slow)]
LENGTHS, NEW, WITHIN = (40, 57, 1, 31), 14, 1e-5
BUDGETS = {"full": None, "h2o": "50%", "snapkv": "50%"}


@cache
def model_of(kind: str) -> PreTrainedModel:
    return tiny_model(kind)


@cache
def alone(kind: str, method: str, length: int) -> tuple[list[int], Tensor]:
    """What `generate` answers to the prompt of this length, and the log probabilities of the tokens."""
    model, ids = model_of(kind), torch.tensor([prompt(length)])
    with torch.no_grad(), mp.compress(model, method, BUDGETS[method]) as kept:
        out = model.generate(  # type: ignore[operator]
            ids, past_key_values=kept, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    new = out.sequences[0, length:]
    scores = torch.stack(out.logits)[:, 0].double().log_softmax(-1)
    return new.tolist(), scores[range(NEW), new]


def engine_for(kind: str, method: str = "h2o", **options: Any) -> Engine:
    chosen = {"max_step_tokens": 16, "page_slots": 4} | options
    return Engine(model_of(kind), method=method, budget=BUDGETS[method], **chosen)


def ask(length: int, name: str | None = None, **options: Any) -> Request:
    return Request(request_id=name or str(length), prompt=prompt(length), params=greedy(NEW, **options))


@pytest.mark.parametrize("method", sorted(BUDGETS))
@pytest.mark.parametrize("kind", TYPES)
def test_batched_and_in_chunks_as_alone(kind: str, method: str) -> None:
    engine = engine_for(kind, method)
    add(engine, *(ask(length, logprobs=0) for length in LENGTHS))
    done = finish(engine)
    engine.close()
    for length in LENGTHS:
        expected, scores = alone(kind, method, length)
        assert tokens(done[str(length)]) == expected
        found = done[str(length)].completions[0].logprobs
        assert found is not None
        apart = (torch.tensor([one.logprob for one in found]) - scores).abs().max()
        assert apart < WITHIN * max(1.0, float(scores.abs().max()))


@pytest.mark.parametrize("step_tokens", [1, 7, 500])
@pytest.mark.parametrize("kind", TYPES)
def test_the_size_of_chunks_changes_nothing(kind: str, step_tokens: int) -> None:
    engine = engine_for(kind, max_step_tokens=step_tokens)
    add(engine, ask(40), ask(31))
    done = finish(engine)
    engine.close()
    for length in (40, 31):
        assert tokens(done[str(length)]) == alone(kind, "h2o", length)[0]


@pytest.mark.parametrize("to_files", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_preempted_and_resumed_as_alone(kind: str, to_files: bool, tmp_path: Path) -> None:
    most, engine = 0, engine_for(kind, "full")
    add(engine, ask(57))
    while engine.busy:
        engine.step()
        most = max(most, engine.stats().kv_bytes)
    engine.close()
    engine = engine_for(kind, "full", kv_memory=int(2.2 * most), overcommit=4, swap_to=tmp_path if to_files else None)
    add(engine, *map(ask, LENGTHS))
    done: dict[str, RequestOutput] = {}
    while engine.busy:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
    assert engine.stats().preemptions > 0
    assert engine.stats().kv_reserved == 0
    engine.close()
    for length in LENGTHS:
        assert tokens(done[str(length)]) == alone(kind, "full", length)[0]


@pytest.mark.parametrize("kind", TYPES)
def test_several_answers_and_repeated_prefixes(kind: str) -> None:
    """Answers of one prompt share its pages, and so do requests that begin alike."""
    engine = engine_for(kind, "full", prefix_cache=True)
    add(engine, ask(57, n=3), ask(40))
    done = {output.request_id: output for output in engine.drain()}
    assert [tokens(done["57"], index) for index in range(3)] == [alone(kind, "full", 57)[0]] * 3
    add(engine, ask(57, "again"))
    assert tokens(engine.drain()[0]) == alone(kind, "full", 57)[0]
    assert engine.stats().shared_tokens > 0
    engine.close()


def test_entries_of_those_that_share_take_nothing() -> None:
    """Two of four layers hold entries; a page has 4 slots, of keys and values of all KV heads in float32."""
    engine = engine_for("gemma3n_text", "full")
    add(engine, ask(57))
    (done,) = finish(engine).values()
    engine.close()
    kv = done.completions[0].kv
    assert kv is not None
    wide = model_of("gemma3n_text").config.head_dim * model_of("gemma3n_text").config.num_key_value_heads * 2 * 4
    assert 0 < kv.kv_bytes <= 2 * (57 + NEW + 4) * wide


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(mp.UnsupportedModelError, match="runner='modules' runs it"):
        Engine(model_of("gemma3n_text"), runner="lean")
    engine = Engine(model_of("gemma3n_text"), method="full")
    options = CacheOptions(method="streaming", budget="50%")
    with pytest.raises(mp.UnsupportedModelError, match=r"lets layers 2, 3 read .* use positions=\"absolute\""):
        add(engine, Request(request_id="r", prompt=prompt(31), params=greedy(2), cache=options))
    engine.close()
