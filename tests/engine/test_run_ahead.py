"""Steps that are launched before the tokens of the step before are read: the same answers, caches and figures."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import millpond as mp
from millpond.cache.layer.layer_cache import LayerCache
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.engine import Engine
from millpond.engine.outputs import EngineStats, KVStats, RequestOutput
from millpond.engine.request import Request
from millpond.engine.sampling.sampler import Sampler
from millpond.engine.step_executor import LaunchedStep, StepExecutor
from millpond.prompt_marks import PromptMarks
from tests.engine import test_codecs
from tests.engine.test_detokenizer import tokenizer_of
from tests.engine.test_request_life import Life
from tests.helpers.engine.helpers import add, alone, ask, engine_for, greedy, tokens
from tests.helpers.examples import examples
from tests.helpers.hf.families import shared_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens

#: What a request came to: tokens, text, why it ended, log probabilities and the size of its cache, by answer.
Outcome = dict[str, list[tuple[Any, ...]]]
COUNTED = ("prompt_tokens", "generated_tokens", "finished", "evicted_entries", "kv_bytes", "kv_reserved")


@pytest.fixture(params=[False, True], ids=["behind", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(Engine, "_runs_ahead", request.param)
    return bool(request.param)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_runs_ahead", True)


def outcome_of(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs, one.kv)
        for one in output.completions
    ]


def outcomes(engine: Engine, batches: Sequence[Sequence[Request]]) -> tuple[Outcome, EngineStats, int]:
    """Ends of requests that come in batches, some steps apart; the figures, and how many steps were ahead."""
    found: Outcome = {}
    waiting, steps = list(batches), 0
    while waiting or engine.busy:
        if waiting and not steps % 6:
            add(engine, *waiting.pop(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=UserWarning)
            found |= {output.request_id: outcome_of(output) for output in engine.step() if output.finished}
        engine.check_integrity()
        steps += 1
    stats, followed = engine.stats(), engine._ahead.n_followed
    engine.close()
    return found, stats, followed


def both(make: Any, *batches: Sequence[Request]) -> tuple[Outcome, int]:
    """What requests come to in an engine that runs ahead, after comparing with one that does not."""
    results = []
    for runs_ahead in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "_runs_ahead", runs_ahead)
            results.append(outcomes(make(), batches))
    (behind, stats_behind, none), (ahead, stats_ahead, followed) = results
    assert none == 0
    assert ahead == behind
    assert {name: getattr(stats_ahead, name) for name in COUNTED} == {
        name: getattr(stats_behind, name) for name in COUNTED
    }
    return ahead, followed


METHODS = ["full", "h2o", "snapkv", "streaming", "fastgen", "d2o", "ems", "ada", "random", "rkv"]


@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str) -> None:
    _, followed = both(lambda: engine_for(method), [ask(40), ask(57, greedy(9))], [ask(31, greedy(20), "c")])
    assert followed > 12


@pytest.mark.parametrize("case", ["full int4", "h2o int4", "h2o mikv", "full rotated4", "h2o by layer", "full by age"])
def test_codecs_too(case: str) -> None:
    requests = [test_codecs.ask(n) for n in test_codecs.LENGTHS[1:]]
    _, followed = both(lambda: test_codecs.engine_for(case), requests)
    assert followed > 20


SAMPLED = {
    "seed": {"seed": 3},
    "filters": {"seed": 4, "top_k": 20, "top_p": 0.9, "temperature": 0.7},
    "min_p": {"seed": 5, "min_p": 0.1, "logprobs": 2},
    "typical": {"seed": 6, "typical_p": 0.5},
    "penalties": {"seed": 7, "repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    "greedy penalties": {"temperature": 0, "frequency_penalty": 1.5, "logprobs": 0},
    "bias": {"seed": 8, "logit_bias": {5: 4.0, 9: 5.0}},
    "three": {"seed": 9, "n": 3, "presence_penalty": 0.5},
}


def test_sampling() -> None:
    """All parameters in one batch, which changes as answers end."""
    requests = [
        ask(40, mp.SamplingParams(max_tokens=8 + 3 * place, **options), name)
        for place, (name, options) in enumerate(SAMPLED.items())
    ]
    _, followed = both(lambda: engine_for("h2o"), requests[:5], requests[5:])
    assert followed > 15


def test_ends_that_only_the_tokens_tell() -> None:
    """Stop ids of what each would say anyway, at different steps; their rows of the next step are dropped."""
    said = {length: alone("h2o", length, 14) for length in (40, 57, 31)}
    requests = [
        ask(length, greedy(14, stop_token_ids=(said[length][at],))) for length, at in ((40, 3), (57, 6), (31, 13))
    ]
    found, followed = both(lambda: engine_for("h2o"), [*requests, ask(1, greedy(14))])
    assert {name: answers[0][2] for name, answers in found.items()} == {
        "40": "stop",
        "57": "stop",
        "31": "stop",
        "1": "length",
    }
    assert followed > 8


def test_stop_texts_and_the_models_own_end() -> None:
    tokenizer = tokenizer_of("byte-level")
    model = shared_model("llama")
    params = [
        mp.SamplingParams(max_tokens=24, seed=seed, temperature=3.0, stop=(stop,), ignore_eos=False)
        for seed, stop in enumerate("aeiou ")
    ]

    def make() -> Engine:
        return Engine(model, tokenizer, method="h2o", budget="30%", page_slots=4, max_step_tokens=64)

    requests = [ask(40, each, str(number)) for number, each in enumerate(params)]
    both(make, requests[:3], requests[3:])


def test_some_answers_need_the_host() -> None:
    """While one has forbidden tokens, nothing runs ahead; the others do afterwards."""
    banned = greedy(6, allowed_token_ids=tuple(range(40)))
    _, followed = both(lambda: engine_for("full"), [ask(40, greedy(20)), ask(57, banned)])
    assert 8 <= followed <= 13
    known = Request(request_id="k", prompt=ask(31).prompt, params=greedy(9), known=((4, 5, 6, 7, 8, 9),))
    _, followed = both(lambda: engine_for("full"), [known])
    assert 1 <= followed <= 2


@pytest.mark.parametrize("marked", ["watch", "report"])
def test_caches_that_are_looked_at_when_they_end(marked: str) -> None:
    more: dict[str, Any] = {"watch": True} if marked == "watch" else {"marks": PromptMarks(report=((2, 9),))}
    _, followed = both(lambda: engine_for("h2o"), [ask(40, **more)])
    assert followed == 0


def test_preemption() -> None:
    requests = [ask(length, greedy(30), name=f"{length} {n}") for n in range(2) for length in (40, 57, 31)]
    made = []

    def make() -> Engine:
        made.append(engine_for("full", kv_memory=60_000, overcommit=3))
        return made[-1]

    _, followed = both(make, requests[:3], requests[3:])
    assert followed > 10
    assert all(engine.stats().preemptions for engine in made)


@pytest.mark.parametrize("prefix_cache", ["live", "lru"])
def test_shared_prompts(prefix_cache: str) -> None:
    requests = [ask(57, greedy(6 + 3 * n), name=str(n)) for n in range(4)]
    _, followed = both(lambda: engine_for("full", prefix_cache=prefix_cache), requests[:2], requests[2:])
    assert followed > 4


def entries(engine: Engine, name: str) -> list[Any]:
    holder = engine.cache_of(name)
    assert holder is not None
    batch_cache, sequence = holder
    return [layer_cache.read(sequence) for layer_cache in batch_cache.layers]


@pytest.mark.parametrize("method", ["full", "h2o", "streaming", "d2o"])
@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_cache_that_is_looked_at_belongs_to_its_tokens(method: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[Any]] = []
    counts = []
    for runs_ahead in (True, False):
        monkeypatch.setattr(Engine, "_runs_ahead", runs_ahead)
        engine = engine_for(method)
        add(engine, ask(40, greedy(14)), ask(57, greedy(14)))
        found: list[int] = []
        while len(found) < (at if runs_ahead else counts[0]):
            found = next((tokens(output) for output in engine.step() if output.request_id == "57"), found)
        kept.append(entries(engine, "57"))
        state = engine._requests["57"]
        counts.append(len(state.completions[0].tokens))
        seen = state.group.batch_cache.tracker.seen[state.group.completions.index(state.completions[0])]
        assert seen == 57 + counts[-1] - 1
        assert (engine._ahead.n_followed > 0) == (runs_ahead and at > 1)
        engine.close()
    assert counts[0] == counts[1]
    for ours, theirs in zip(*kept, strict=True):
        assert torch.equal(ours.positions, theirs.positions)
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-5)


def test_tokens_that_a_look_brought_are_reported(always: None) -> None:
    engine, found = engine_for("h2o"), []
    add(engine, ask(40))
    while engine.busy:
        outputs = engine.step()
        engine.cache_of("40")
        found += [tokens(output) for output in outputs]
    assert found[-1] == alone("h2o", 40)
    assert all(before == after[: len(before)] for before, after in pairwise(found))
    engine.close()


def test_no_row_behind_the_last_token_that_is_allowed(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, real = Counter[str](), StepExecutor.launch

    def counting(self: StepExecutor, groups: list[DecodeGroup], before: LaunchedStep | None) -> LaunchedStep:
        rows.update(completion.key[0] for group in groups for completion in group.completions)
        return real(self, groups, before)

    monkeypatch.setattr(StepExecutor, "launch", counting)
    engine = engine_for("h2o")
    add(engine, ask(40, greedy(9)), ask(57, greedy(14)), ask(31, greedy(14)))
    found = {output.request_id: tokens(output) for output in engine.drain()}
    assert {name: len(answer) for name, answer in found.items()} == {"40": 9, "57": 14, "31": 14}
    assert rows["31"] == 13  # the first comes from its prompt
    assert rows["40"] < 9
    assert rows["57"] < 14
    assert engine._ahead.n_followed > 8
    engine.close()


def test_service_is_that_of_the_rows_that_counted(ahead: bool) -> None:
    """An answer that ended has a row in the next step, which its client does not pay."""
    engine = engine_for("h2o")
    said = alone("h2o", 57, 14)
    ends = max(said, key=said.index)
    add(engine, ask(40, greedy(40)), ask(57, greedy(14, stop_token_ids=(ends,))))
    while not any(output.request_id == "57" and output.finished for output in engine.step()):
        pass
    state = engine._requests["40"]
    engine.cache_of("40")  # reads what is pending
    n = len(state.completions[0].tokens)
    stopped = said.index(ends) + 1
    assert stopped > 4
    assert state.scheduled.client.served == 40 + 57 + 2 * 16 + (n - 1) + (stopped - 1)
    engine.close()


def test_cancelled_between_steps(ahead: bool) -> None:
    engine = engine_for("h2o")
    add(engine, ask(40), ask(57))
    for _ in range(12):
        engine.step()
    engine.cancel("40")
    engine.check_integrity()
    found = {output.request_id: output for output in engine.drain()}
    assert found["40"].completions[0].finish_reason == "cancelled"
    assert tokens(found["40"]) == alone("h2o", 40)[: len(tokens(found["40"]))]
    assert tokens(found["57"]) == alone("h2o", 57)
    add(engine, ask(31))
    for _ in range(6):
        engine.step()
    engine.cancel("31")
    assert engine.busy
    (output,) = engine.step()
    assert output.finished
    assert not engine.busy
    assert engine.stats().kv_bytes == 0
    add(engine, ask(31))  # the same name again
    assert [tokens(output) for output in engine.drain()] == [alone("h2o", 31)]
    engine.close()


@pytest.mark.parametrize("at", [1, 2, 5, 6, 9])
def test_a_pass_that_fails(at: int, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, in the middle of its layers: the tokens of the step before count, and all come to their own end."""
    engine, passes, real = engine_for("full", runner="modules"), [], LayerCache.attend_newest
    add(engine, ask(40), ask(57, greedy(7)))

    def failing(self: LayerCache, *args: Any, **options: Any) -> Any:
        if self.index == 1:
            passes.append(1)
            if len(passes) == at:
                raise RuntimeError("planted")
        return real(self, *args, **options)

    monkeypatch.setattr(LayerCache, "attend_newest", failing)
    found = {output.request_id: tokens(output) for output in engine.drain()}
    assert found == {"40": alone("full", 40), "57": alone("full", 57)[:7]}
    assert engine._faults.n_restarted == 2 if at < 7 else engine._faults.n_restarted >= 1
    assert engine._ahead.n_followed > 3
    engine.close()


@pytest.mark.parametrize("where", ["launch", "finish"])
def test_a_choice_that_fails_ends_its_request_alone(where: str, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls, real = engine_for("h2o"), [], getattr(Sampler, where)
    add(engine, ask(40), ask(57), ask(31))

    def failing(self: Sampler, first: Any, *args: Any, **options: Any) -> Any:
        keys = first if where == "launch" else (args[0] if args else first.keys)
        calls.append(1)
        if len(calls) > 9 and ("57", 0) in keys:
            raise RuntimeError("planted")
        return real(self, first, *args, **options)

    monkeypatch.setattr(Sampler, where, failing)
    found = {output.request_id: output for output in engine.drain()}
    assert found["57"].error is not None
    assert tokens(found["57"]) == alone("h2o", 57)[: len(tokens(found["57"]))]
    assert {name: tokens(found[name]) for name in ("40", "31")} == {
        name: alone("h2o", int(name)) for name in ("40", "31")
    }
    assert engine.stats().kv_bytes == 0
    engine.close()


def test_logits_without_a_number_end_one_request(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls, real = engine_for("h2o"), [], Sampler.launch
    add(engine, ask(40), ask(57), ask(31))

    def spoiled(self: Sampler, keys: Sequence[Any], logits: torch.Tensor, *args: Any) -> Any:
        calls.append(1)
        if len(calls) > 9 and ("57", 0) in keys:
            logits = logits.clone()
            logits[list(keys).index(("57", 0))] = torch.nan
        return real(self, keys, logits, *args)

    monkeypatch.setattr(Sampler, "launch", spoiled)
    found = {output.request_id: output for output in engine.drain()}
    assert "NaN" in str(found["57"].error)
    assert {name: tokens(found[name]) for name in ("40", "31")} == {
        name: alone("h2o", int(name)) for name in ("40", "31")
    }
    engine.close()


def test_a_request_that_moves(always: None) -> None:
    first, second = engine_for("h2o"), engine_for("h2o", page_slots=8)
    add(first, ask(40), ask(57))
    for _ in range(13):
        first.step()
    assert first._ahead.n_followed > 2
    copy, data = first.checkpoint("40"), first.export_request("57")
    assert copy is not None
    assert [output.request_id for output in first.step()] == ["40"]  # of the other one the second engine tells
    first.check_integrity()
    second.import_request(data)
    found = {output.request_id: tokens(output) for engine in (first, second) for output in engine.drain()}
    assert found == {"40": alone("h2o", 40), "57": alone("h2o", 57)}
    second.import_request(copy)
    assert [tokens(output) for output in second.drain()] == [alone("h2o", 40)]
    first.close()
    second.close()


def test_sessions_store_what_was_answered(always: None, tmp_path: Any) -> None:
    engine = engine_for("full", cache_dir=str(tmp_path))
    add(engine, ask(40))
    engine.drain()
    assert engine._ahead.n_followed == 0
    engine.close()


def test_on_a_cpu_nothing_runs_ahead() -> None:
    engine = engine_for("h2o")
    add(engine, ask(40))
    engine.drain()
    assert engine._ahead.n_followed == 0
    engine.close()


def test_in_a_thread_of_its_own(always: None) -> None:
    async def run() -> dict[int, list[list[int]]]:
        llm = mp.AsyncLLM(shared_model("llama"), budget="30%", max_step_tokens=16, page_slots=4)

        async def answer(length: int) -> list[list[int]]:
            return [tokens(output) async for output in llm.stream(ask(length))]

        try:
            found = await asyncio.wait_for(asyncio.gather(*map(answer, (40, 57, 31))), 60)
            assert llm.stats().kv_bytes == 0
        finally:
            await llm.close()
        return dict(zip((40, 57, 31), found, strict=True))

    for length, outputs in asyncio.run(run()).items():
        assert outputs[-1] == alone("h2o", length)
        assert len(set(map(len, outputs))) > 10


class LifeAhead(Life):
    """Requests of several methods come and go while steps run ahead, and somebody looks at caches in between."""

    def make(self) -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "_runs_ahead", True)
            return super().make()

    @precondition(lambda self: self.going)
    @rule(data=st.data())
    def look_inside(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.going)))
        holder = self.engine.cache_of(name)
        state = self.engine._requests.get(name)
        if holder is not None and state is not None and state.private_cache is None:
            cache, sequence = holder
            read = int(cache.tracker.seen[sequence])
            assert read == len(state.ids) + len(state.completions[0].tokens) - 1

    @precondition(lambda self: self.going)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        self.engine.checkpoint(data.draw(st.sampled_from(sorted(self.going))))


TestLifeAhead = LifeAhead.TestCase
TestLifeAhead.settings = settings(
    max_examples=examples(6), stateful_step_count=14, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule(seed: int, always: None) -> None:
    """Requests with all kinds of ends come and go at random steps: each says what it says alone, or a part of it."""
    draw = random.Random(seed)
    engine = engine_for("h2o", kv_memory=70_000, overcommit=2, max_step_tokens=64)
    lengths: dict[str, tuple[int, int]] = {}
    done: dict[str, RequestOutput] = {}
    for step in range(90):
        if step < 60 and draw.random() < 0.2:
            name, length, most = str(step), draw.choice([20, 31, 40, 57]), draw.randint(1, 25)
            said = alone("h2o", length, 25)
            stop = (draw.choice(said),) if draw.random() < 0.5 else ()
            add(engine, ask(length, greedy(most, stop_token_ids=stop), name))
            ends = [said.index(token) + 1 for token in stop]
            lengths[name] = length, min([most, *ends])
        if lengths and draw.random() < 0.05:
            engine.cancel(draw.choice(list(lengths)))
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
    done |= {output.request_id: output for output in engine.drain()}
    assert done.keys() == lengths.keys()
    for name, (length, n) in lengths.items():
        (answer,) = done[name].completions
        assert list(answer.token_ids) == alone("h2o", length, 25)[: len(answer.token_ids)]
        assert answer.finish_reason == "cancelled" or len(answer.token_ids) == n
        assert isinstance(answer.kv, KVStats) or answer.finish_reason == "cancelled"
    assert engine._ahead.n_followed > 10
    assert engine.stats().kv_bytes == 0
    engine.close()
