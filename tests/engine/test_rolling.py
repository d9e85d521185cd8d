"""Texts that are longer than the model's context: what is kept moves to its beginning, and they go on."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import millpond as mp
from millpond.cache.state import gap_closing
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import BudgetError, CacheMismatchError, DataError, OptionError, UnsupportedModelError
from millpond.prompt_marks import PromptMarks
from tests.helpers.hf.families import family

CONTEXT, BUDGET = 128, 40


@functools.cache
def model(name: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    return family(name).make(max_position_embeddings=CONTEXT)


@functools.cache
def wide() -> PreTrainedModel:
    """Heads of 64 channels, which codes need, and a context that holds pages of them."""
    torch.manual_seed(0)
    return family("llama").make(
        max_position_embeddings=320, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    )


def engine_for(method: str = "h2o", of: PreTrainedModel | None = None, **options: Any) -> Engine:
    return Engine(of or model(), method=method, overflow="rolling", **{"budget": BUDGET, **options})


def prompt(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 90, n).tolist())


def asked(name: str, n: int, new: int, **more: Any) -> Request:
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    return Request(request_id=name, prompt=prompt(n, len(name)), params=params, **more)


def finish(engine: Engine, steps: int | None = None) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    while engine.busy and (steps is None or steps > 0):
        done |= {output.request_id: output for output in engine.step() if output.finished}
        steps = None if steps is None else steps - 1
    engine.check_integrity()
    return done


def tokens(output: RequestOutput) -> tuple[int, ...]:
    assert output.error is None
    return output.completions[0].token_ids


def alone(request: Request, method: str = "h2o", of: PreTrainedModel | None = None, **options: Any) -> tuple[int, ...]:
    engine = engine_for(method, of, **options)
    engine.add(request)
    found = tokens(finish(engine)[request.request_id])
    engine.close()
    return found


@pytest.mark.filterwarnings("ignore")
def test_h2o_goes_on_as_generate_closes_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """`GapClosing`, which is tested against its definition, gives stored keys the same places at the same moments."""
    monkeypatch.setattr(gap_closing, "MIN_CLOSING_DISTANCE", 1)
    request = asked("one", 50, 500)
    with mp.compress(model(), "h2o", BUDGET, positions="cache_relative") as cache:
        ids = torch.tensor([request.prompt])
        mask = torch.ones_like(ids)
        text = model().generate(
            ids, past_key_values=cache, max_new_tokens=500, do_sample=False, attention_mask=mask, pad_token_id=0
        )
        layer_cache = cache.layer_caches[0]
        assert layer_cache.frames is not None
        assert layer_cache.frames[0] > 300, "gaps were closed"
    expected = tuple(text[0, 50:].tolist())
    assert alone(request) == expected
    assert alone(request, options={"positions": "cache_relative"}) == expected


@pytest.mark.parametrize("method", ["h2o", "streaming"])
def test_thousands_of_tokens_stay_within_the_budget(method: str) -> None:
    engine = engine_for(method)
    engine.add(asked("long", 1000, 700))
    held = set()
    while engine.busy:
        for output in engine.step():
            kv = output.completions[0].kv
            found = engine.cache_of("long")
            assert found is None or int(found[0].tracker.seen.max(initial=0)) <= CONTEXT
            if kv is not None and kv.seen > 1000:
                held.add((kv.held, kv.kv_bytes))
                assert kv.evicted == (kv.seen - BUDGET) * 4
    assert len(held) == 1, "entries and bytes are flat"
    assert len(tokens(output)) == 700
    assert kv is not None
    assert kv.seen == 1699
    engine.close()


def test_the_cut_of_a_long_prompt_changes_nothing() -> None:
    request = asked("long", 700, 40)
    expected = alone(request)
    assert alone(request, max_step_tokens=37) == expected
    assert alone(request, prefix_cache=True, max_step_tokens=64) == expected


def test_sequences_beside_each_other_swapped_and_cancelled() -> None:
    requests = [asked("a" * n, length, 200) for n, length in enumerate((5, 128, 129, 300), 1)]
    expected = {request.request_id: alone(request) for request in requests}
    engine = engine_for(kv_memory=60_000, max_step_tokens=64, overcommit=8.0)
    for request in [*requests, asked("cancelled", 300, 10_000)]:
        engine.add(request)
    finish(engine, 100)
    engine.cancel("cancelled")
    done = finish(engine)
    preempted = engine.stats().preemptions
    assert {name: tokens(output) for name, output in done.items() if name != "cancelled"} == expected
    assert done["cancelled"].completions[0].finish_reason == "cancelled"
    assert preempted > 0
    assert engine.stats().kv_bytes == 0
    engine.close()


@pytest.mark.parametrize(
    ("method", "codec"),
    [("h2o", "int4"), ("streaming", "int8"), pytest.param("h2o", "0=bf16,*=int4", marks=pytest.mark.slow)],
)
def test_codes_stay_when_positions_change(method: str, codec: str) -> None:
    """Together, alone and moved to another engine: the same tokens; and codes are never encoded again."""
    options: dict[str, Any] = {"budget": 200, "codec": codec}
    requests = [asked("a", 20, 330), asked("bb", 660, 150)]
    expected = {request.request_id: alone(request, method, wide(), **options) for request in requests}
    first, second = (engine_for(method, wide(), **options) for _ in range(2))
    for request in requests:
        first.add(request)
    done = finish(first, 120)
    found = first.cache_of("bb")
    assert found is not None
    assert found[0].tracker.closed[found[1]] > 0
    table = found[0].layers[1].table
    assert table is not None
    assert table.quantized is not None
    assert table.quantized.lens.any(), "some entries are codes"
    second.import_request(first.export_request("bb"))
    done |= finish(first) | finish(second)
    assert {name: tokens(output) for name, output in done.items()} == expected
    first.close()
    second.close()


def test_keys_stand_where_closed_gaps_put_them() -> None:
    """Plain keys are turned and codes are not, and both are those of the text at their new positions."""
    engine = engine_for("h2o", wide(), budget=200, codec="int4")
    engine.add(asked("a", 260, 60))
    finish(engine, 40)
    found = engine.cache_of("a")
    assert found is not None
    (batch_cache, sequence), layer_cache = found, found[0].layers[1]
    rotary = batch_cache._rotations[1]
    assert rotary is not None
    before = layer_cache.read(sequence)
    seen = int(batch_cache.tracker.seen[sequence])
    batch_cache.close_gaps(sequence)
    after = layer_cache.read(sequence)
    n = int((before.positions[0] >= 0).sum())
    assert after.positions[0, :n].tolist() == list(range(n))
    assert batch_cache.tracker.seen[sequence] == n < seen
    assert batch_cache.tracker.closed[sequence] == seen - n
    here, there = before.positions[:1, :n].long(), after.positions[:1, :n].long()
    turned = rotary.rotate(rotary.rotate(before.keys[:, None, :n], here, inverse=True), there)[:, 0]
    torch.testing.assert_close(after.keys[:, :n], turned, rtol=0.02, atol=0.02)
    assert torch.equal(after.values, before.values)
    assert torch.equal(after.scores, before.scores)
    assert torch.equal(layer_cache.text_positions(sequence, after.positions)[:, :n], here)
    engine.check_integrity()
    engine.close()


def test_what_was_forgotten_is_told_by_places_in_the_text() -> None:
    engine = engine_for("streaming")
    engine.add(asked("told", 300, 100, marks=PromptMarks(report=((0, 4), (4, 300)))))
    answer = finish(engine)["told"].completions[0]
    assert [one.share for one in answer.forgotten] == [0.0, 1.0]
    engine.close()


def test_n_answers_go_on_each_for_itself() -> None:
    engine = engine_for()
    params = SamplingParams(n=3, max_tokens=300, temperature=1.0, seed=3, ignore_eos=True)
    engine.add(Request(request_id="three", prompt=prompt(120), params=params))
    found = finish(engine)["three"].completions
    assert [len(one.token_ids) for one in found] == [300] * 3
    assert len({one.token_ids for one in found}) == 3
    engine.close()


def test_no_tokens_asked_for_are_as_many_as_the_context_holds() -> None:
    engine = engine_for()
    engine.add(Request(request_id="a", prompt=prompt(200), params=SamplingParams(max_tokens=None, ignore_eos=True)))
    assert len(tokens(finish(engine)["a"])) == CONTEXT
    engine.close()


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("llama", {"method": "full", "budget": None}, OptionError, "evicts nothing.*use h2o, tova, streaming"),
    ("llama", {"method": "snapkv"}, OptionError, "use h2o"),
    ("llama", {"method": "d2o"}, OptionError, "use h2o"),
    ("llama", {"method": "keydiff"}, OptionError, "use h2o"),
    ("llama", {"options": {"decode": "grow"}}, OptionError, "decode='evict'"),
    ("llama", {"options": {"average": True}}, OptionError, "how far apart"),
    ("llama", {"budget": CONTEXT}, BudgetError, "needs at most 108 of the model's 128 positions"),
    ("llama", {"codec": "flexgen4"}, OptionError, "before RoPE.*for example, int8"),
    ("llama", {"codec": "mikv"}, OptionError, "before RoPE"),
    ("llama", {"overflow": "roll"}, OptionError, "unknown overflow"),
    ("opt", {}, UnsupportedModelError, "no rotary position embedding.*overflow='refuse'"),
]


@pytest.mark.parametrize(("name", "options", "error", "said"), REFUSED)
def test_what_cannot_go_on_is_refused(name: str, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Engine(model(name), **{"method": "h2o", "budget": BUDGET, "overflow": "rolling", **options})


def test_frequencies_that_change_with_the_text_are_refused() -> None:
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=r"changes its rotary frequencies.*overflow='refuse'"):
        engine_for(of=family("llama").make(max_position_embeddings=CONTEXT, rope_parameters=scaled))


def test_a_request_is_refused_as_an_engine_is() -> None:
    engine = engine_for()
    with pytest.raises(OptionError, match="use h2o"):
        engine.add(asked("a", 5, 5, cache=CacheOptions(method="full")))
    engine.add(asked("b", 5, 5, cache=CacheOptions(method="tova")))
    assert len(tokens(finish(engine)["b"])) == 5
    engine.close()


def test_texts_end_with_the_context_as_before() -> None:
    engine = Engine(model(), method="h2o", budget=BUDGET)
    assert engine.text_limit == CONTEXT
    with pytest.raises(OptionError, match="context holds 128"):
        engine.add(asked("a", CONTEXT, 5))
    engine.add(asked("b", 100, 500))
    assert len(tokens(finish(engine)["b"])) == CONTEXT - 100
    engine.close()


def test_moved_requests_that_do_not_fit_together() -> None:
    first, plain = engine_for(), Engine(model(), method="h2o", budget=BUDGET)
    first.add(asked("a", 100, 300))
    finish(first, 100)
    data = first.export_request("a")
    with pytest.raises((CacheMismatchError, DataError, OptionError)):
        plain.import_request(data)
    assert first.import_request(data) == "a"
    assert tokens(finish(first)["a"]) == alone(asked("a", 100, 300))
    first.close()
    plain.close()
