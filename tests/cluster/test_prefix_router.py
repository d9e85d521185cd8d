"""Prompts that begin alike go where their beginning is held, and no worker starves for it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from millpond.cluster.router import Load, PrefixLedger, choose
from millpond.engine.chunks.prompt import Prompt
from millpond.engine.cluster_figures import Role
from millpond.engine.request import CacheOptions, Request
from tests.helpers.cluster.local import LocalCluster
from tests.helpers.cluster.routing import BLOCK, SimulatedWorkers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens
READS: frozenset[Role] = frozenset({"replica"})


def ask(prompt: tuple[int, ...] | str | Prompt, **fields: object) -> Request:
    return Request(request_id="x", prompt=prompt, **fields)  # type: ignore[arg-type]


def numbers(generator: random.Random, n: int) -> tuple[int, ...]:
    return tuple(generator.randrange(90) for _ in range(n))


def test_keys_follow_the_beginning_the_salt_and_the_cache() -> None:
    ledger, words = PrefixLedger(4), tuple(range(11))
    keys = ledger.keys(ask(words))
    assert len(keys) == 2, "full blocks only"
    assert ledger.keys(ask((*words[:4], 90, *words[5:])))[0] == keys[0]
    assert ledger.keys(ask((*words[:4], 90, *words[5:])))[1] != keys[1]
    assert ledger.keys(ask((90, *words[1:])))[1] != keys[1], "a block is one behind its beginning"
    for other in (ask(words, cache_salt="a"), ask(words, cache=CacheOptions(method="h2o"))):
        assert not set(ledger.keys(other)) & set(keys)
    assert not set(PrefixLedger(4).keys(ask(words))) & set(keys), "keys of another process are others"
    assert len(ledger.keys(ask("a text of 32 characters, or two."))) == 2


def test_a_worker_is_believed_to_hold_what_it_reports_at_most() -> None:
    ledger = PrefixLedger(4)
    first, second = (ledger.keys(ask(tuple(range(begin, begin + 12)))) for begin in (0, 50))
    ledger.note("a", first)
    ledger.note("a", second)
    assert (ledger.hits("a", first), ledger.hits("a", second), ledger.hits("b", first)) == (12, 12, 0)
    ledger.trim("a", 4)
    assert (ledger.hits("a", first), ledger.hits("a", second)) == (4, 12), "ends go first, and what was used first"
    ledger.trim("a", 0)
    assert ledger.hits("a", second) == 0
    ledger.note("b", first)
    ledger.keep_workers(["a"])
    assert ledger.hits("b", first) == 0


def test_the_spared_tokens_count_against_what_waits() -> None:
    loads = [Load("a", "replica", 100, 0, None), Load("b", "replica", 0, 0, None)]
    assert choose(loads, READS) == "b"
    assert choose(loads, READS, spared={"a": 101}) == "a"
    assert choose(loads, READS, spared={"a": 99}) == "b", "reading it again is sooner done than waiting"


def sessions(n: int, turns: int, seed: int = 0) -> Iterator[tuple[float, Request]]:
    """Agents that send their whole history each time, and all begin with the same 160 tokens."""
    generator = random.Random(seed)
    common = numbers(generator, 160)
    texts = [common + numbers(generator, 100 + 20 * (index % 7)) for index in range(n)]
    at = 0.0
    for _ in range(turns):
        for index in generator.sample(range(n), n):
            at += generator.expovariate(1.0)
            yield at, ask(texts[index])
            texts[index] += numbers(generator, 60)


def test_sessions_hit_as_they_would_in_one_engine_with_all_memory() -> None:
    room = 24 * 2000 // BLOCK
    one = SimulatedWorkers(1, room, 400.0).run(sessions(24, 12))
    several = SimulatedWorkers(4, room, 100.0).run(sessions(24, 12))
    blind = SimulatedWorkers(4, room, 100.0).run(sessions(24, 12), aware=False)
    print(one.hits, several.hits, blind.hits, several.imbalance)
    assert several.hits >= 0.95 * one.hits
    assert blind.hits < 0.8 * one.hits
    assert several.imbalance <= 1.5


def test_a_hot_beginning_does_not_starve_other_workers() -> None:
    """Nine of ten prompts begin alike, and come faster than one worker reads."""
    generator = random.Random(1)
    hot = numbers(generator, 1600)
    asks = []
    for n in range(400):
        begin = hot if generator.random() < 0.9 else numbers(generator, 100)
        asks.append((n * 1.0, ask(begin + numbers(generator, 64))))
    done = SimulatedWorkers(4, 4 * 400, 30.0).run(asks)
    assert done.imbalance <= 1.5
    assert done.hits >= 0.8 * 0.9 * 400 * 1600


def test_requests_go_where_their_beginning_was_read() -> None:
    """Real engines with a prefix cache: the second turn of each session hits, on the worker of its first."""
    import millpond as mp

    generator = random.Random(2)
    texts = [numbers(generator, 48) for _ in range(4)]
    params = mp.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    engine = {"prefix_cache": True, "method": "snapkv", "page_slots": 16}
    with LocalCluster(replicas=2, engine=engine, slots=16) as local:
        local.wait_until(lambda: all(one.stats is not None for one in local.cluster.dispatcher.workers()))
        local.llm.generate(texts, params)
        first = {request.prompt: worker.name for worker in local.made for request in worker.sent}
        again = [text + numbers(generator, 20) for text in texts]
        outputs = local.llm.generate(again, params)
        second = {request.prompt: worker.name for worker in local.made for request in worker.sent}
        assert [second[text] for text in again] == [first[text] for text in texts]
        assert len(set(first.values())) == 2
        assert all(one.completions[0].kv is not None for one in outputs)
        assert local.llm.stats().shared_tokens >= 4 * 32


def test_a_prompt_of_chunks_has_no_keys() -> None:
    assert PrefixLedger(4).keys(ask(Prompt(["a text", "another"]))) == ()
