"""The simulation of workers: times of single requests, memory, moves, and what is conserved."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.budget import Budget
from millpond.errors import OptionError
from millpond_lab.cluster_plan.layout import FREE_MOVES, CacheSize, ClusterLayout, Link, MoveTimes, WorkerPlan
from millpond_lab.cluster_plan.profile import A100, DecodeTimes, StepLoad, StepTimes
from millpond_lab.cluster_plan.simulate import MissLimit, PlannedRequest, RequestTimes, Simulation, sample
from tests.helpers.examples import examples

TIMES = StepTimes(0.01, 1e-3, 0.0, (DecodeTimes(None, 0.02, 1e-5, 1e-3),), per_prompt=0.005)
FULL = CacheSize(100, 100)


def split(
    readers: int = 1, decoders: int = 1, memory: int | None = None, moves: MoveTimes = FREE_MOVES
) -> ClusterLayout:
    reader, decoder = (WorkerPlan(role, TIMES, memory=memory, moves=moves) for role in ("prefill", "decode"))
    return ClusterLayout((reader,) * readers + (decoder,) * decoders)


def run(
    layout: ClusterLayout, requests: list[PlannedRequest], cache: CacheSize = FULL, link: Link | None = None
) -> list[RequestTimes]:
    found = Simulation(layout, cache, link).run(requests)
    assert found is not None
    return found


def test_a_request_alone_takes_its_steps() -> None:
    (outcome,) = run(ClusterLayout((WorkerPlan("both", TIMES),)), [PlannedRequest(0.0, 100, 3)])
    assert outcome.ttft == pytest.approx(0.01 + 0.1 + 0.005)
    assert outcome.tpot == pytest.approx((2 * (0.02 + 1e-3) + 1e-5 * (101 + 102)) / 2)
    assert outcome.moved == 0


def test_a_split_adds_the_move_to_the_second_token() -> None:
    alone = run(ClusterLayout((WorkerPlan("both", TIMES),)), [PlannedRequest(0.0, 100, 3)])[0]
    (moved,) = run(split(), [PlannedRequest(0.0, 100, 3)], link=Link(1e6, 0.25))
    assert alone.tpot is not None
    assert moved.tpot is not None
    assert moved.ttft == alone.ttft
    assert moved.moved == 100 * 100
    assert 2 * (moved.tpot - alone.tpot) == pytest.approx(0.25 + 1e4 / 1e6)


def test_fewer_entries_in_fewer_bytes_move_and_decode_faster() -> None:
    small = CacheSize(100, 25, Budget.parse("20%"), grows=False)
    requests = [PlannedRequest(0.0, 100, 11)]
    (full,), (kept,) = (run(split(), requests, cache, Link(1e6)) for cache in (FULL, small))
    assert (full.moved, kept.moved) == (10_000, 500)
    assert small.kept(100, 10) == small.kept(100) == 20
    assert full.tpot is not None
    assert kept.tpot is not None
    attended = sum(100 + n for n in range(1, 11)) - 10 * 20
    assert 10 * (full.tpot - kept.tpot) == pytest.approx(9_500 / 1e6 + 1e-5 * attended)


def test_an_answer_of_one_token_does_not_move() -> None:
    (outcome,) = run(split(), [PlannedRequest(0.0, 100, 1)])
    assert (outcome.tpot, outcome.moved) == (None, 0)


def test_moves_of_one_reader_follow_each_other() -> None:
    requests = [PlannedRequest(0.0, 10, 2), PlannedRequest(0.0, 10, 2)]
    slow = Link(bytes_per_s=100.0)  # 10 s each
    first, second = run(split(), requests, link=slow)
    assert first.tpot is not None
    assert second.tpot is not None
    assert second.tpot - first.tpot == pytest.approx(10.0, abs=0.1)


def test_moves_occupy_both_workers_between_their_steps() -> None:
    """Three requests by hand: the reader packs 1 s and the decoder takes in 2 s, one after another."""
    reading, packing, taking = 0.01 + 0.1 + 0.005, 1.0, 2.0
    moves = MoveTimes(pack_base=0.4, pack_per_byte=6e-5, take_base=0.5, take_per_byte=1.5e-4)  # of 10,000 bytes
    layout = split(moves=moves)
    layout = ClusterLayout(tuple(replace(worker, step_tokens=100) for worker in layout.workers))
    first, second, third = run(layout, [PlannedRequest(0.0, 100, 3) for _ in range(3)], link=Link(latency_s=0.25))
    assert first.ttft == pytest.approx(reading)
    assert second.ttft == pytest.approx(2 * reading + packing)  # no step while the first one is packed
    assert third.ttft == pytest.approx(3 * reading + 2 * packing)
    # the second comes while the first is taken in, the third while the second is: a step lies between two of them
    assert 2 * reading + 2 * packing + 0.25 < reading + packing + 0.25 + taking

    def step(*entries: int) -> float:
        return 0.02 + len(entries) * 1e-3 + sum(entries) * 1e-5

    first_ends = reading + packing + 0.25 + taking + step(101) + taking + step(102, 101)
    second_ends = first_ends + taking + step(102, 101)
    ends = (first_ends, second_ends, second_ends + step(102))
    for one, end in zip((first, second, third), ends, strict=True):
        assert one.tpot == pytest.approx((end - one.ttft) / 2)


def test_short_moves_are_taken_in_together() -> None:
    """As many between two steps as end within a fifth of the last one."""
    moves = MoveTimes(take_base=0.003)
    layout = ClusterLayout(tuple(replace(one, step_tokens=300) for one in split(moves=moves).workers))
    others = [PlannedRequest(0.5, 100, 3) for _ in range(3)]  # which come together, while the first one decodes
    found = run(layout, [PlannedRequest(0.0, 100, 100), *others])
    seconds = sorted(one.tpot or 0.0 for one in found[1:])
    assert seconds[0] == pytest.approx(seconds[1]), "3 ms had gone of 4.4 ms when the second could begin"
    assert seconds[2] > seconds[1] + 0.005, "6 ms when the third could, which waits for a step"


def test_a_cache_is_taken_in_behind_the_step_that_is_under_way() -> None:
    """An answer of many tokens waits while another request is taken in, and the other one for its step."""
    moves = MoveTimes(take_base=3.0)
    long, short = PlannedRequest(0.0, 100, 101), PlannedRequest(4.0, 100, 2)
    alone, taken = run(split(moves=moves), [long])[0], run(split(moves=moves), [long, short])
    assert alone.tpot is not None
    assert taken[0].tpot is not None
    assert taken[1].tpot is not None
    assert 100 * (taken[0].tpot - alone.tpot) == pytest.approx(3.0, abs=0.01)
    assert 3.02 < taken[1].tpot < 3.0 + 3 * 0.024


def test_memory_lets_requests_wait_and_is_never_exceeded() -> None:
    requests = [PlannedRequest(0.0, 100, 20) for _ in range(8)]
    free = run(ClusterLayout((WorkerPlan("both", TIMES),)), requests)
    tight = run(ClusterLayout((WorkerPlan("both", TIMES, memory=25_000),)), requests)
    assert max(o.ttft for o in tight) > 2 * max(o.ttft for o in free)
    with pytest.raises(OptionError, match="holds 12,000 bytes, a worker that does both has 11,999"):
        run(ClusterLayout((WorkerPlan("both", TIMES, memory=11_999),)), requests)


def test_what_waits_to_be_fetched_stops_the_reader() -> None:
    requests = [PlannedRequest(0.0, 2000, 2) for _ in range(4)]  # each fills a step, and moves for 20 s
    free = run(split(), requests, link=Link(1e4))
    bounded = run(split(), requests, link=Link(1e4, memory=10_000))
    assert max(o.ttft for o in free) < 10
    assert max(o.ttft for o in bounded) > 60


def test_a_simulation_that_has_failed_ends() -> None:
    requests = [PlannedRequest(0.001 * n, 1000, 5) for n in range(50)]
    layout = ClusterLayout((WorkerPlan("both", TIMES),))
    assert Simulation(layout, FULL).run(requests, MissLimit(0.5, 1.0, 10)) is None
    assert Simulation(layout, FULL).run(requests, MissLimit(1e3, 1e3, 0)) is not None


@given(seed=st.integers(0, 10**6), readers=st.integers(0, 2), decoders=st.integers(1, 2), tight=st.booleans())
@settings(max_examples=examples(25))
def test_every_request_gets_all_of_its_tokens(seed: int, readers: int, decoders: int, tight: bool) -> None:
    draw = random.Random(seed)
    lengths = [(draw.randint(1, 60), draw.randint(1, 12)) for _ in range(30)]
    memory = 9_000 if tight else None
    both = WorkerPlan("both", TIMES, memory=memory)
    moves = MoveTimes(0.01, 1e-6, 0.02, 0.0) if seed % 2 else FREE_MOVES
    layout = split(readers, decoders, memory, moves) if readers else ClusterLayout((both,) * decoders)
    requests = sample(lengths, 30, 20.0, seed)
    simulation = Simulation(layout, FULL, Link(1e5, 0.001, memory=8_000))
    found = simulation.run(requests)
    assert found is not None
    assert all(outcome.ttft > 0 for outcome in found)
    assert [outcome.tpot is None for outcome in found] == [request.output == 1 for request in requests]
    left = [(worker.flights, worker.held, worker.incoming, worker.between) for worker in simulation._workers]
    assert not any(any(parts) for parts in left)
    assert all(len(worker.scheduler) == 0 and worker.unread == 0 for worker in simulation._workers)


def test_a_mixed_step_has_the_larger_base_once() -> None:
    reads, decodes = StepLoad(tokens=10, squares=100, ended=1), StepLoad(answers=2, entries=50)
    mixed = StepLoad(10, 100, 1, 2, 50)
    both = TIMES.seconds(reads) + TIMES.seconds(decodes)
    assert TIMES.seconds(mixed) == pytest.approx(both - 0.01)
    assert TIMES.seconds(StepLoad()) == 0


def test_an_overhead_counts_once_a_step() -> None:
    slower = TIMES.with_overhead(0.5)
    for load in (StepLoad(10, 100, 1), StepLoad(answers=2, entries=10), StepLoad(10, 100, 1, 2, 10)):
        assert slower.seconds(load) == pytest.approx(TIMES.seconds(load) + 0.5)
    assert slower.seconds(StepLoad()) == 0


def test_large_batches_have_times_of_their_own() -> None:
    times = A100["opt-13b"][1]
    few, many = (times.seconds(StepLoad(answers=n, entries=n)) for n in (94, 95))
    assert few == pytest.approx(1e-3 * (19.934702624895458 + 94 * (0.0006269356524350583 + 0.03850697740828398)))
    assert many == pytest.approx(1e-3 * (7.1661889468253595 + 95 * (0.0005798000403396046 + 0.15831096191764046)))


def test_roles_of_a_layout() -> None:
    both, reader = WorkerPlan("both", TIMES), WorkerPlan("prefill", TIMES)
    for workers in ((both, reader), (reader,), ()):
        with pytest.raises(OptionError, match="workers do both, or some read prompts and others decode"):
            ClusterLayout(workers)
    assert split(2, 1).name == "2 prefill + 1 decode"


def test_a_budget_in_bytes_cannot_be_planned() -> None:
    with pytest.raises(OptionError, match="a share or tokens"):
        CacheSize(100, 100, Budget.parse("1MiB"))


@given(
    seed=st.integers(0, 10**6),
    layout=st.integers(0, 3),
    grows=st.booleans(),
    rate=st.floats(0.5, 30.0),
    moves=st.sampled_from([FREE_MOVES, MoveTimes(0.02, 1e-6, 0.03, 1e-6), MoveTimes(take_base=0.01)]),
)
@settings(max_examples=examples(30))
def test_steps_taken_at_once_are_those_taken_one_by_one(
    seed: int, layout: int, grows: bool, rate: float, moves: MoveTimes
) -> None:
    class OneByOne(Simulation):
        def _repeat(self, worker: Any, step: Any, load: StepLoad) -> tuple[float, StepLoad]:
            return self._now, load

    draw = random.Random(seed)
    lengths = [(draw.randint(1, 60), draw.randint(1, 40)) for _ in range(25)]
    both = WorkerPlan("both", TIMES, memory=20_000)
    workers = [ClusterLayout((both,)), ClusterLayout((both, both)), split(1, 1, 20_000), split(1, 2, 20_000)][layout]
    cache = FULL if grows else CacheSize(100, 25, Budget.parse("20%"), grows=False)
    workers = ClusterLayout(tuple(replace(worker, moves=moves) for worker in workers.workers))
    requests = sample(lengths, 25, rate, seed)
    found, expected = (kind(workers, cache, Link(1e5, 0.01)).run(requests) for kind in (Simulation, OneByOne))
    assert found is not None
    assert expected is not None
    for one, other in zip(found, expected, strict=True):
        assert one.ttft == pytest.approx(other.ttft, rel=1e-9)
        assert (one.tpot is None) == (other.tpot is None)
        assert one.tpot is None or one.tpot == pytest.approx(other.tpot, rel=1e-9)


def test_long_answers_take_few_events() -> None:
    """3,000 requests are to take seconds: a request alone is one step of its prompt and two of its answer."""
    simulation = Simulation(ClusterLayout((WorkerPlan("both", TIMES),)), FULL)
    assert simulation.run([PlannedRequest(100.0 * n, 100, 1000) for n in range(300)]) is not None
    assert simulation._count < 6 * 300


def test_the_router_counts_what_is_read_until_an_answer_begins() -> None:
    """A worker that has read half of a prompt counts as one that has all of it to read, as in a cluster."""
    slow = StepTimes(0.0, 1e-2, 0.0, (DecodeTimes(None, 0.01, 0.0, 0.0),))
    workers = ClusterLayout((WorkerPlan("both", slow, step_tokens=100), WorkerPlan("both", slow, step_tokens=100)))
    requests = [PlannedRequest(0.0, 400, 1), PlannedRequest(0.1, 300, 1), PlannedRequest(2.9, 100, 1)]
    first, second, third = run(workers, requests)
    assert (first.ttft, second.ttft) == (pytest.approx(4.0), pytest.approx(3.0))
    assert third.ttft == pytest.approx(1.2)  # behind the second, of which 100 tokens are left, and 300 count


@pytest.mark.parametrize(("memory", "together"), [(60_000, False), (380_000, False), (420_000, True)])
def test_caches_that_wait_to_be_taken_in_take_a_twentieth_of_the_memory(memory: int, together: bool) -> None:
    """Two readers end at once with 10,000 bytes each, of which a request holds 10,200 with its answer: two of them are
    a twentieth of 408,000 bytes. Where they do not fit one is fetched, in 10 s, when the other was taken in.
    """
    requests = [PlannedRequest(0.0, 100, 2) for _ in range(2)]
    seconds = sorted(one.tpot or 0.0 for one in run(split(2, 1, memory), requests, link=Link(1e3)))
    assert seconds[0] == pytest.approx(10.0, abs=0.1)
    assert seconds[1] == pytest.approx(10.0 if together else 20.0, abs=0.2)
