"""Batches whose common beginnings are read once: the same tokens, one reading, and no page held at the end."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from millpond.engine.batch_plan import plan_batch
from millpond.engine.engine import Engine
from millpond.engine.llm import LLM
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import MillpondError, NumericsError, OptionError
from tests.engine.test_codecs import model as wide_model
from tests.engine.test_prefix_cache_full_pool import bytes_of, distinct, tree_of_prompts
from tests.helpers.engine.helpers import METHODS, budget_of, engine_for, finish, greedy
from tests.helpers.hf.families import shared_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

#: Three levels, parting inside pages of 4 entries, in no order; and some that are equal, short or beginnings of others.
_TREE = tree_of_prompts((41, 22, 9), (2, 2, 2))
PROMPTS = [_TREE[n] for n in (5, 0, 3, 6, 1, 7, 2, 4)]
PROMPTS += [PROMPTS[0], PROMPTS[0][:30], (3,), PROMPTS[1][:44]]

#: That sum over the queries of a prompt; that need its last ones; and that need none.
METHODS_OF_TEST = ["full", "snapkv", "ada", "h2o", "kvmerger", "fastgen", "expected_attention", "pyramidkv"]


def answers(schedule: str, prompts: list[tuple[int, ...]], params: SamplingParams, **options: Any) -> tuple[Any, Any]:
    """Tokens of every answer, and the engine's figures."""
    with LLM(options.pop("model", shared_model("llama")), page_slots=4, max_step_tokens=48, **options) as llm:
        outputs = llm.generate(prompts, params, schedule=schedule)  # type: ignore[arg-type]
        llm.engine.check_integrity()
        assert [out.prompt_token_ids for out in outputs] == prompts
        return [[one.token_ids for one in out.completions] for out in outputs], llm.stats()


@pytest.mark.in_turns(0, of=2)
@pytest.mark.parametrize("method", METHODS_OF_TEST)
def test_a_batch_changes_no_token_and_reads_each_once(method: str) -> None:
    own = {"method": method, "options": METHODS[method], "budget": budget_of(method)}
    there, _ = answers("arrival", PROMPTS, greedy(5), **own)
    here, stats = answers("batch", PROMPTS, greedy(5), **own)
    assert here == there
    assert stats.prompt_tokens == plan_batch(PROMPTS).to_read < 1.15 * distinct(PROMPTS)
    assert stats.prompt_tokens + stats.shared_tokens > sum(map(len, PROMPTS))  # prefixes are read besides
    assert stats.kv_bytes == 0


@pytest.mark.parametrize("codec", ["int4", "kivi2", "fp8"])
def test_number_formats_share_too(codec: str) -> None:
    own: dict[str, Any] = {"model": wide_model(), "method": "full", "codec": codec}
    there, _ = answers("arrival", PROMPTS[:6], greedy(4), **own)
    here, stats = answers("batch", PROMPTS[:6], greedy(4), **own)
    assert here == there
    assert stats.prompt_tokens < 0.6 * sum(map(len, PROMPTS[:6]))


@pytest.mark.parametrize("method", ["streaming", "infllm"])
def test_methods_whose_state_cannot_be_copied_answer_alike(method: str) -> None:
    own = {"method": method, "options": METHODS[method], "budget": budget_of(method)}
    there, _ = answers("arrival", PROMPTS[:4], greedy(4), **own)
    here, stats = answers("batch", PROMPTS[:4], greedy(4), **own)
    assert here == there
    assert stats.shared_tokens == 0


def test_seeds_and_several_answers() -> None:
    params = SamplingParams(max_tokens=6, temperature=0.9, seed=7, n=2)
    there, _ = answers("arrival", PROMPTS[:6], params, method="full")
    here, _ = answers("batch", PROMPTS[:6], params, method="full", kv_memory=bytes_of(300))
    assert here == there
    assert len({tuple(one) for pair in here for one in pair}) > 6


@pytest.mark.parametrize("method", ["full", "snapkv", "h2o"])
def test_a_batch_reads_each_token_once_in_memory_for_few_of_them(method: str) -> None:
    prompts = tree_of_prompts((56, 40, 16), (3, 4, 3))
    prompts = [prompts[n] for n in np.random.default_rng(0).permutation(len(prompts))]
    limit = bytes_of(distinct(prompts) // 4, new=0)
    own = {"method": method, "options": METHODS[method], "budget": budget_of(method)}
    here, stats = answers("batch", prompts, greedy(3), kv_memory=limit, **own)
    assert stats.prompt_tokens <= 1.01 * distinct(prompts)
    assert stats.preemptions == 0
    there, _ = answers("arrival", prompts, greedy(3), kv_memory=limit, **own)
    assert here == there


def test_a_plan_tells_what_will_be_read() -> None:
    with LLM(shared_model("llama"), method="full", page_slots=4) as llm:
        plan = llm.plan_batch(PROMPTS, greedy(2))
        assert llm.stats().prompt_tokens == 0
        llm.generate(PROMPTS, greedy(2), schedule="batch")
        assert llm.stats().prompt_tokens == plan.to_read < plan.tokens
        assert plan.least == distinct(PROMPTS)
        assert plan.pinned_bytes is not None
        assert plan.pinned_bytes > 0
        assert llm.plan_batch(PROMPTS, levels=1).to_read > plan.to_read
        assert llm.plan_batch(PROMPTS, cache=CacheOptions(method="streaming", budget=8)).to_read == plan.tokens
        assert llm.plan_batch([]).readings == ()
        assert llm.generate([], schedule="batch") == []


def test_errors_of_a_batch_take_nothing_in() -> None:
    with LLM(shared_model("llama"), method="full", page_slots=4) as llm:
        with pytest.raises(OptionError, match="did you mean 'batch'"):
            llm.generate(PROMPTS, greedy(2), schedule="batsh")  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="the prompt has 300 tokens"):
            llm.generate([*PROMPTS, (1,) * 300], greedy(2), schedule="batch")
        assert not llm.engine.busy
        same = Request(request_id="one", prompt=PROMPTS[0], params=greedy(2))
        with pytest.raises(OptionError, match="2 requests of a batch are named 'one'"):
            llm.engine.add_batch([same, same])
        llm.engine.add(same)
        with pytest.raises(OptionError, match="'one' is in flight already"):
            llm.engine.add_batch([same])


def test_salts_keep_batches_apart() -> None:
    engine = engine_for("full")
    asked = [
        Request(request_id=f"{n}", prompt=PROMPTS[0], params=greedy(2), cache_salt=salt)
        for n, salt in enumerate((None, None, "a", "a", "b"))
    ]
    engine.add_batch(asked)
    finish(engine)
    length = len(PROMPTS[0])
    assert engine.stats().prompt_tokens == 2 * (length - 1 + 2) + length
    engine.close()


@pytest.mark.parametrize("sharing", ["live", "lru"])
def test_beginnings_of_a_batch_with_a_salt_are_for_that_salt_alone(sharing: str) -> None:
    engine = engine_for("full", prefix_cache=sharing)
    engine.add_batch([Request(request_id=f"{n}", prompt=PROMPTS[0], params=greedy(9), cache_salt="a") for n in "12"])
    while engine.stats().generated_tokens < 2:
        engine.step()
    engine.add(Request(request_id="stranger", prompt=PROMPTS[0], params=greedy(2)))
    done = {output.request_id: output for output in engine.drain()}
    assert done["stranger"].completions[0].kv.shared_tokens == 0
    engine.close()


def random_batch(rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Prompts of a random tree, with some that are equal or beginnings of others."""
    texts: list[tuple[int, ...]] = [()]
    for _ in range(12):
        before = texts[rng.integers(len(texts))]
        if len(before) < 100:
            texts.append((*before, *rng.integers(2, 90, rng.integers(1, 40)).tolist()))
    return [texts[n] for n in rng.integers(1, len(texts), 14)]


@pytest.mark.covering
@pytest.mark.parametrize("method", ["full", "snapkv", "h2o"])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_is_answered_or_ends_and_no_page_is_held(
    seed: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random trees, limits, overcommitment, prefix caches, cancels, and passes that fail."""
    rng = np.random.default_rng(1000 * seed + len(method))
    prompts = random_batch(rng)
    longest = max(map(len, prompts))
    limit = [None, bytes_of(longest + 8, new=6), bytes_of(2 * longest, new=6), bytes_of(5 * longest, new=6)][seed]
    if limit is not None:  # the least that the longest one needs alone, with what its method holds besides pages
        alone = Request(request_id="alone", prompt=max(prompts, key=len), params=greedy(4))
        probe = engine_for(method)
        limit = max(limit, probe._validator.validate(alone).scheduled.memory_need.peak(1))
        probe.close()
    engine = engine_for(
        method,
        kv_memory=limit,
        overcommit=float(rng.choice([1.0, 2.0])),
        prefix_cache=bool(rng.integers(2)),
        max_step_tokens=int(rng.choice([8, 24, 64])),
    )
    asked = [Request(request_id=str(n), prompt=prompt, params=greedy(4)) for n, prompt in enumerate(prompts)]
    engine.add_batch(asked)
    cancelled = set(map(str, rng.choice(len(asked), 3, replace=False)))
    fails = set(rng.choice(40, 2, replace=False).tolist())
    passes = 0
    forward = engine._model.forward

    def failing(*args: Any, **rest: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes in fails:
            raise NumericsError("the pass failed")
        return forward(*args, **rest)

    monkeypatch.setattr(engine._model, "forward", failing)
    done: dict[str, Any] = {}
    steps = 0
    while engine.busy:
        steps += 1
        assert steps < 2000
        if steps > 3 and cancelled and rng.integers(3) == 0:
            engine.cancel(cancelled.pop())
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
        assert limit is None or engine.stats().kv_reserved <= limit
    assert done.keys() == {one.request_id for one in asked}
    assert engine._scheduler.reserved_bytes == len(engine._scheduler) == 0
    engine._parts.prefix_cache.tree.clear()
    engine._parts.trim()
    assert engine._parts.memory.nbytes == 0
    right = _alone(method, tuple(prompts))
    ends = {"length", "cancelled", "error"}
    for name, output in done.items():
        (completion,) = output.completions
        assert completion.finish_reason in ends
        assert completion.token_ids == right[int(name)][: len(completion.token_ids)]
    engine.close()


def _alone(method: str, prompts: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    engine = engine_for(method, max_step_tokens=64)
    for n, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(n), prompt=prompt, params=greedy(4)))
    done = finish(engine)
    engine.close()
    return [done[str(n)].completions[0].token_ids for n in range(len(prompts))]


def test_a_prefix_that_blocks_is_let_go() -> None:
    """Beside what another batch holds, nothing would fit: its prefix goes, and its prompts are read whole."""
    engine = engine_for("full", kv_memory=bytes_of(130, new=8), max_step_tokens=256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        head = _TREE[0][:41]
        engine.add_batch([Request(request_id=f"a{n}", prompt=(*head, n + 2, 5), params=greedy(8)) for n in range(2)])
        for _ in range(2):
            engine.step()
        shared_prefix = next(state for state in engine._requests if state.scheduled.is_shared_prefix)
        engine._parts.shared_prefixes.release(shared_prefix)
        engine.check_integrity()
        done = finish(engine)
    assert [len(done[f"a{n}"].completions[0].token_ids) for n in range(2)] == [8, 8]
    engine.close()


def test_the_pass_of_a_prefix_that_fails_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(shared_model("llama"), method="full", page_slots=4, max_step_tokens=256)
    forward, calls = engine._model.forward, 0

    def once(*args: Any, **rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MillpondError("the pass failed")
        return forward(*args, **rest)

    monkeypatch.setattr(engine._model, "forward", once)
    engine.add_batch([Request(request_id=str(n), prompt=_TREE[n], params=greedy(3)) for n in range(3)])
    done = finish(engine)
    assert [done[str(n)].error for n in range(3)] == [None] * 3
    lost, rest = 41, sum(len(_TREE[n]) for n in range(3)) - 3 * 41
    assert engine.stats().prompt_tokens > 2 * lost + 22, "the first prefix was read again, by all that was behind it"
    assert engine.stats().prompt_tokens < 3 * lost + rest
    engine.close()
