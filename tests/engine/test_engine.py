"""How requests begin, end, are refused and fail."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.errors import BudgetError, NumericsError, OptionError, UnsupportedModelError
from millpond.models.load import load_model, load_tokenizer
from tests.helpers.engine.helpers import add, alone, ask, engine_for, finish, greedy, prompt, tokens
from tests.helpers.hf.families import family, shared_model
from tests.hf.test_vision import vision_model


@pytest.fixture
def engine() -> Any:
    made = engine_for("h2o", kv_memory="100kB")
    yield made
    made.close()


def until_decoding(engine: Engine, n: int = 1) -> None:
    while not any(output.completions[0].token_ids for output in engine.step()):
        pass
    for _ in range(n):
        engine.step()


def test_figures_of_a_request(engine: Engine) -> None:
    add(engine, ask(40))
    output = finish(engine)["40"]
    done = output.completions[0]
    assert output.finished
    assert done.finish_reason == "length"
    assert done.kv is not None
    assert (done.kv.seen, done.kv.held) == (40 + 13, 12.0)
    assert done.kv.evicted == (53 - 12) * 4
    assert 0 < done.kv.kv_bytes < done.kv.full_kv_bytes
    times = output.times
    assert times.started is not None
    assert times.first_token is not None
    assert times.finished is not None
    assert times.arrived <= times.started < times.first_token < times.finished
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.finished) == (40, 14, 1)
    assert stats.evicted_entries == done.kv.evicted


def test_a_cancelled_request_frees_its_pages_at_once(engine: Engine) -> None:
    add(engine, ask(40), ask(31))
    until_decoding(engine, 3)
    engine.cancel("40")
    engine.check_integrity()
    engine.cancel("40")  # it is gone
    done = finish(engine)
    assert done["40"].completions[0].finish_reason == "cancelled"
    assert 0 < len(tokens(done["40"])) < 14
    assert tokens(done["31"]) == alone("h2o", 31)


def test_a_request_may_be_cancelled_before_it_begins_and_while_it_is_read(engine: Engine) -> None:
    add(engine, ask(57), ask(40))
    engine.step()
    engine.cancel("57")
    engine.cancel("40")
    assert {n: out.completions[0].finish_reason for n, out in finish(engine).items()} == dict.fromkeys(
        ("57", "40"), "cancelled"
    )


def test_a_request_that_was_carried_out_may_be_cancelled() -> None:
    engine = engine_for("full", kv_memory="36kB", overcommit=4)
    add(engine, ask(57), ask(40), ask(31))
    while not engine.stats().swapped:
        engine.step()
    for name in ("57", "40", "31"):
        engine.cancel(name)
    assert len(finish(engine)) == 3
    engine.close()


def test_a_deadline_ends_a_request_with_what_it_has(engine: Engine) -> None:
    add(engine, ask(40, greedy(200), deadline=0.2), ask(31))
    until_decoding(engine)
    time.sleep(0.2)
    done = finish(engine)
    assert done["40"].completions[0].finish_reason == "deadline"
    assert tokens(done["40"]) == alone("h2o", 40)[: len(tokens(done["40"]))]
    assert done["31"].completions[0].finish_reason == "length"


def test_the_models_end_and_stop_tokens(engine: Engine) -> None:
    usual = alone("h2o", 40)
    add(engine, ask(40, greedy(stop_token_ids=(usual[3],))))
    done = finish(engine)["40"].completions[0]
    assert (list(done.token_ids), done.finish_reason, done.stop_reason) == (usual[:4], "stop", usual[3])
    engine._model.end_tokens = frozenset([usual[5]])
    add(engine, ask(40), ask(40, greedy(ignore_eos=True), name="on"))
    both = finish(engine)
    assert (tokens(both["40"]), tokens(both["on"])) == (usual[:6], usual)
    assert both["40"].completions[0].finish_reason == "stop"
    assert both["40"].completions[0].stop_reason is None


def test_one_token_needs_no_plan(engine: Engine) -> None:
    add(engine, ask(40, greedy(1)))
    done = finish(engine)["40"].completions[0]
    assert list(done.token_ids) == alone("h2o", 40)[:1]
    assert done.kv is not None
    assert done.kv.held == 40


def test_priorities() -> None:
    engine = engine_for("full", kv_memory="40kB")
    add(engine, ask(57, priority=1), ask(40, priority=1))
    until_decoding(engine)
    add(engine, ask(80, priority=0))
    order = list(finish(engine))
    assert order[0] == "80"
    assert engine.stats().preemptions >= 1
    engine.close()


def test_log_probabilities_of_prompt_and_answer(engine: Engine) -> None:
    add(engine, ask(31, greedy(5, logprobs=2, prompt_logprobs=1)))
    output = finish(engine)["31"]
    ids = torch.tensor([prompt(31)])
    with torch.no_grad():
        expected = shared_model("llama")(ids).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 31
    for place, found in enumerate(output.prompt_logprobs[1:], start=1):
        assert found is not None
        assert found.token_id == ids[0, place]
        assert found.logprob == pytest.approx(float(expected[place - 1, found.token_id]), abs=1e-3)
        assert len(found.top) == 1
    logprobs = output.completions[0].logprobs
    assert logprobs is not None
    assert [one.token_id for one in logprobs] == tokens(output)
    assert logprobs[0].top[0][0] == tokens(output)[0]
    assert len(logprobs[0].top) == 2


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request(request_id="x", prompt=()), "empty"),
        (Request(request_id="x", prompt=(1, 96)), "96 is not one of the model's 96"),
        (Request(request_id="x", prompt=(1, -1)), "-1 is not one"),
        (Request(request_id="x", prompt="text"), "needs a tokenizer"),
        (ask(300), "300 tokens, and the model's context holds 256"),
        (ask(4, greedy(stop=("x",))), "need a tokenizer"),
        (ask(4, deadline=0.0), "must be more than 0"),
        (ask(4, greedy(n=100)), "more than the 64 answers"),
        (ask(4, greedy(stop_token_ids=(96,))), "names token 96"),
        (ask(4, cache=CacheOptions(method="h20")), "did you mean 'h2o'"),
        (ask(4, cache=CacheOptions(options={"nothing": 1})), "nothing"),
        (ask(4, cache=CacheOptions(codec="int5")), "unknown codec 'int5'"),
        (ask(4, cache=CacheOptions(method="kvzip", options={"ask": "none"})), "repeat each prompt"),
        (ask(4, cache=CacheOptions(method="sirllm")), "predictions for every token"),
        (ask(4, cache=CacheOptions(method="full", budget=5)), "takes no budget"),
        (ask(4, cache=CacheOptions(budget="0%")), "a ratio must be above 0 and at most 1"),
    ],
)
def test_refused_at_once(request_: Request, says: str) -> None:
    engine = engine_for("h2o", kv_memory="1MB", max_running=64)
    with pytest.raises(OptionError, match=says):
        engine.add(request_)
    assert not engine.busy
    engine.close()


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = engine_for("full", kv_memory="20kB")
    with pytest.raises(BudgetError, match=r"120 tokens and 1 x 50 new ones may need [\d,]+ bytes .* 20,000"):
        engine.add(ask(120, greedy(50)))
    add(engine, ask(31, greedy(4)))
    assert len(finish(engine)) == 1
    engine.close()


def test_a_name_in_flight_is_refused(engine: Engine) -> None:
    add(engine, ask(4))
    with pytest.raises(OptionError, match="in flight"):
        engine.add(ask(4))
    finish(engine)
    add(engine, ask(4))
    assert len(finish(engine)) == 1


def test_models_that_cannot_run_packed() -> None:
    with pytest.raises(UnsupportedModelError, match="images"):
        Engine(vision_model("qwen2_vl"))
    with pytest.raises(UnsupportedModelError, match="latents"):
        Engine(shared_model("deepseek_v3"))


def test_close_gives_the_model_its_attention_back() -> None:
    model = family("llama").make()  # that no other test uses
    before = model.config._attn_implementation
    engine = Engine(model)
    assert model.config._attn_implementation != before
    add(engine, ask(40))
    engine.step()
    engine.close()
    assert model.config._attn_implementation == before
    assert engine.stats().kv_reserved == 0
    with pytest.raises(BudgetError):
        Engine(model, budget="nonsense")
    assert model.config._attn_implementation == before


# ---------------------------------------------------------------------- failures


def test_a_step_that_fails_once_ends_nobody(engine: Engine, monkeypatch: Any) -> None:
    add(engine, ask(40), ask(31))
    until_decoding(engine, 3)

    def fail(*args: Any) -> None:
        raise NumericsError("attention is NaN")

    monkeypatch.setattr(engine._model, "forward", fail)
    assert engine.step() == []
    monkeypatch.undo()
    engine.check_integrity()
    done = finish(engine)
    assert {name: tokens(output) for name, output in done.items()} == {str(n): alone("h2o", n) for n in (40, 31)}


def test_a_mistake_of_ours_ends_the_only_request(engine: Engine, monkeypatch: Any) -> None:
    add(engine, ask(40))
    monkeypatch.setattr(engine._model, "forward", lambda *args: 1 / 0)
    (output,) = engine.step()
    assert "ZeroDivisionError" in str(output.error)
    assert not engine.busy


# ---------------------------------------------------------------------- text


def test_llm_answers_texts() -> None:
    model, tokenizer = load_model("pond-recall", "f32"), load_tokenizer("pond-recall")
    with mp.LLM(model, tokenizer=tokenizer, method="full", kv_memory="32MiB") as llm:
        texts = ["The mill stands by the", "Water is"]
        first, second = llm.generate(texts, mp.SamplingParams(max_tokens=6, temperature=0))
        assert first.prompt == texts[0]
        with mp.compress(model, "full") as cache:
            ids = tokenizer(texts[0], return_tensors="pt")
            out = model.generate(**ids, max_new_tokens=6, do_sample=False, cache=cache)
        expected = out[0, ids["input_ids"].shape[1] :]
        assert tokens(first) == expected.tolist()
        assert first.completions[0].text == tokenizer.decode(expected, skip_special_tokens=True)
        (ids_only,) = llm.generate(list(second.prompt_token_ids), mp.SamplingParams(max_tokens=6, temperature=0))
        assert ids_only.prompt is None
        assert tokens(ids_only) == tokens(second)
        with pytest.raises(OptionError, match="1 params for 2"):
            llm.generate(texts, [mp.SamplingParams()])
        with pytest.raises(OptionError, match="1 is no prompt"):
            llm.generate([1, "two"])
        with pytest.raises(OptionError, match="empty"):
            llm.generate([[1], []])
        assert llm.stats().waiting == llm.stats().running == 0


def test_a_dtype_belongs_to_a_model_that_is_loaded() -> None:
    with pytest.raises(OptionError, match="dtype='f32'"):
        mp.LLM(shared_model("llama"), dtype="f32")
