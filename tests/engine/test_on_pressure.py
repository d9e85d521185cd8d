"""Requests that must forget nothing: refused with numbers before they are read, or nothing of their prompts leaves."""

from __future__ import annotations

from typing import Any

import pytest

import millpond as mp
from millpond.engine.cache_snapshots import held_positions
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError, WouldForgetError
from tests.helpers.engine.helpers import KEEP_ALL, METHODS, add, ask, greedy, prompt
from tests.helpers.hf.families import family, shared_model

LENGTH, BUDGET = 57, 64
#: Methods whose heads decide by what they read.
OWN_RULES = ("attention_gate", "duo_attention", "fastgen")
#: Their newest entries alone would be more than the budget.
OPTIONS = METHODS | {"simlayerkv": {"recent": 8}, "duo_attention": {"recent": 8}}


def engine_for(method: str, budget: Any = BUDGET, options: Any = None, **more: Any) -> Engine:
    chosen = OPTIONS[method] if options is None else options
    budget = "30%" if method == "infllm" else budget  # of what is looked up
    return Engine(
        shared_model("llama"),
        method=method,
        options=chosen,
        budget=None if method in KEEP_ALL else budget,
        max_step_tokens=16,
        page_slots=4,
        **more,
    )


def refusing(new: int | None, name: str = "one", length: int = LENGTH, **options: Any) -> Request:
    params = mp.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    return ask(length, params, name=name, cache=CacheOptions(on_pressure="refuse", **options))


def steps_that_hold_all(engine: Engine, name: str, length: int = LENGTH) -> Any:
    """Step to the end; whenever the prompt was read every head of every layer holds each token of it."""
    looks, done = 0, None
    while engine.busy:
        for output in engine.step():
            done = output if output.finished and output.request_id == name else done
        found = engine.cache_of(name)
        if found is not None and int(found[0].tracker.seen[found[1]]) > length:
            looks += 1
            for layer in found[0].layers:
                assert layer.table is not None
                heads = [set() for _ in range(layer.table.n_kv_heads)]
                for part in held_positions(layer, found[1]):
                    for head, row in zip(heads, part, strict=True):
                        head.update(int(position) for position in row)
                assert all(head >= set(range(length)) for head in heads)
        engine.check_integrity()
    assert looks > 2
    assert done is not None
    return done


@pytest.mark.in_turns(1, of=3)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", [name for name in METHODS if name not in OWN_RULES])
def test_what_is_not_refused_forgets_nothing(method: str) -> None:
    engine = engine_for(method)
    grows = method in KEEP_ALL or method == "infllm" or not engine.cache_factory.policy.every_step
    new = 20 if grows else BUDGET - LENGTH + 1
    add(engine, refusing(new), ask(40))
    done = steps_that_hold_all(engine, "one")
    assert len(done.completions[0].token_ids) == new
    if not grows:
        with pytest.raises(WouldForgetError, match=f"lower max_tokens to {new}"):
            engine.add(refusing(new + 1))
    if method not in (*KEEP_ALL, "infllm"):
        held = r"holds 63 .* 2 \(3.1%\)" if method == "pyramidkv" else r"holds 64 .* 1 \(1.5%\)"
        with pytest.raises(WouldForgetError, match=rf"has 65 tokens .* {held} would be evicted"):
            engine.add(refusing(1, length=65))
    engine.close()


@pytest.mark.covering
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ada", {"score": "h2o"}),
        ("snapkv", {"decode": "evict"}),
        ("h2o", {"decode": "grow"}),
        ("merge_on_evict", {"score": "h2o"}),
        ("pyramidkv", {"score": "h2o"}),
        ("kvmerger", {"decode": "merge"}),
    ],
)
@pytest.mark.parametrize("budget", [BUDGET, "20%, at least 64", "100%", "40KiB"])
def test_it_holds_for_other_options_and_budgets(method: str, options: dict[str, Any], budget: Any) -> None:
    engine = engine_for(method, budget, options)
    add(engine, refusing(None))
    done = steps_that_hold_all(engine, "one") if budget != "100%" else engine.drain()[0]
    assert done.completions[0].finish_reason == "length"
    engine.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("method", "options"),
    [*((name, None) for name in OWN_RULES), ("dms", {"threshold": 0.5, "window": 8}), ("kvmerger", {"eps": 0.5})],
)
def test_methods_with_rules_of_their_own_are_refused(method: str, options: dict[str, Any] | None) -> None:
    engine = engine_for(method, options=options)
    with pytest.raises(OptionError, match="rules of their own, whatever the budget holds; use another method"):
        engine.add(refusing(4))
    engine.close()


def test_an_answer_without_a_limit_ends_where_something_would_leave() -> None:
    engine = engine_for("h2o")
    engine.add(refusing(None))
    done = steps_that_hold_all(engine, "one")
    assert len(done.completions[0].token_ids) == BUDGET - LENGTH + 1
    assert done.completions[0].finish_reason == "length"
    engine.close()


def test_the_engine_says_it_for_requests_that_do_not() -> None:
    engine = engine_for("h2o", on_pressure="refuse")
    with pytest.raises(WouldForgetError):
        engine.add(ask(LENGTH, greedy(30)))
    engine.add(ask(LENGTH, greedy(30), name="evict", cache=CacheOptions(on_pressure="evict")))
    (done,) = engine.drain()
    assert done.completions[0].kv.evicted > 0
    engine.close()
    with pytest.raises(OptionError, match="did you mean 'refuse'"):
        engine_for("h2o", on_pressure="refus")
    engine = engine_for("h2o")
    with pytest.raises(OptionError, match="unknown on_pressure 'evct'"):
        engine.add(ask(LENGTH, cache=CacheOptions(on_pressure="evct")))
    engine.close()


def test_the_context_is_not_cut_to_what_fits() -> None:
    model = family("llama").make(max_position_embeddings=80)
    engine = Engine(model, method="full", page_slots=4)
    engine.add(ask(LENGTH, greedy(30), name="cut"))
    assert len(engine.drain()[0].completions[0].token_ids) == 80 - LENGTH
    with pytest.raises(OptionError, match=r"57 tokens of prompt and 30 new ones are 87, and .* context holds 80"):
        engine.add(refusing(30))
    engine.add(refusing(None, name="open"))
    assert len(engine.drain()[0].completions[0].token_ids) == 80 - LENGTH
    engine.close()


def test_texts_beyond_the_context_are_refused_under_rolling_too() -> None:
    model = family("llama").make(max_position_embeddings=128)
    engine = Engine(model, method="h2o", budget=64, overflow="rolling", page_slots=4)
    with pytest.raises(OptionError, match="context holds 128"):
        engine.add(refusing(100))
    engine.add(refusing(None))
    assert len(engine.drain()[0].completions[0].token_ids) == 64 - LENGTH + 1
    engine.close()


def test_waiting_and_preemption_lose_nothing_and_are_no_reason() -> None:
    """Requests that together exceed `kv_memory` wait, and one that is preempted comes back as it was."""
    alone = engine_for("h2o")
    alone.add(refusing(8))
    first = alone.drain()[0].completions[0].token_ids
    need = alone.cache_factory.prompt_pool(alone.layers[0]).page_bytes * 2 * len(alone.layers) * (BUDGET // 4 + 2)
    alone.close()
    engine = engine_for("h2o", kv_memory=int(1.5 * need), overcommit=3)
    for n in range(4):
        engine.add(refusing(8, name=str(n)))
    done = {output.request_id: output for output in engine.drain()}
    assert {one.completions[0].token_ids for one in done.values()} == {first}
    assert engine.stats().preemptions
    engine.close()


def test_llm_says_it_for_a_call() -> None:
    with mp.LLM("pond-recall", method="h2o", budget=32) as llm:
        with pytest.raises(WouldForgetError, match="would be evicted"):
            llm.generate(prompt(40), cache=CacheOptions(on_pressure="refuse"))
        (out,) = llm.generate(prompt(20), greedy(4), cache=CacheOptions(method="tova", on_pressure="refuse"))
        assert out.completions[0].kv is not None
        assert out.completions[0].kv.evicted == 0
