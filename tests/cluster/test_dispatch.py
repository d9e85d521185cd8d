"""A cluster of workers in one process: outputs of one engine, moves, deaths, cancels. No Ray, and no clock."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import millpond as mp
from millpond.cluster.async_llm import AsyncClusterLLM
from millpond.cluster.cluster_request import SentCompletion
from millpond.cluster.messages import CompletionDelta, WorkerReport
from millpond.cluster.ray_worker import check_address
from millpond.cluster.router import Load, choose
from millpond.cluster.settings import ClusterSettings
from millpond.engine.outputs import EngineStats, RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.errors import DataError, MillpondError, OptionError, PoolFullError, WouldForgetError
from millpond.prompt_marks import PromptMarks
from tests.helpers.cluster.local import LocalCluster, LocalWorker
from tests.helpers.engine.helpers import budget_of, prompt
from tests.helpers.hf.families import shared_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens
PROMPTS = [prompt(length) for length in (40, 57, 9, 31)]
NEW = 12


def params(**options: Any) -> mp.SamplingParams:
    return mp.SamplingParams(**{"max_tokens": NEW, "temperature": 0.8, "seed": 7, "ignore_eos": True} | options)


@cache
def expected(method: str = "h2o", n: int = 1) -> list[list[tuple[int, ...]]]:
    """The answers of one engine."""
    options = {"max_step_tokens": 16, "page_slots": 4}
    with mp.LLM(shared_model("llama"), method=method, budget=budget_of(method), **options) as llm:
        return answers(llm.generate(PROMPTS, params(n=n)))


def start(local: LocalCluster, prompts: list[tuple[int, ...]], **fields: Any) -> list[SimpleQueue[RequestOutput]]:
    """Send requests, and return where their outputs come."""
    dispatcher, queues = local.cluster.dispatcher, [SimpleQueue[RequestOutput]() for _ in prompts]
    for index, (text, queue) in enumerate(zip(prompts, queues, strict=True)):
        request = Request(request_id=str(index), prompt=text, params=params(), **fields)
        local.cluster.loop.call(lambda request=request, queue=queue: dispatcher.submit(request, queue.put)).result()
    return queues


def test_generate_passes_spans_and_pressure_on() -> None:
    """Each as what it is: all are spans of tokens."""
    with LocalCluster(replicas=1) as local:
        marks = PromptMarks(keep=((2, 6),), forget=((10, 20), (30, 33)), breakpoints=(8,))
        (output,) = local.llm.generate([PROMPTS[1]], params(), marks=marks)
        assert output.error is None
        (sent,) = local.made[0].sent
        assert sent.marks == marks
        kv = output.completions[0].kv
        assert kv is not None
        assert kv.forgotten_tokens == 13
        with pytest.raises(WouldForgetError):
            local.llm.generate([PROMPTS[1]], params(), cache=CacheOptions(method="h2o", budget=8, on_pressure="refuse"))


def finished(queues: list[SimpleQueue[RequestOutput]]) -> list[RequestOutput]:
    """The last output of each; what came before only grows."""
    found = []
    for queue in queues:
        known: tuple[int, ...] = ()
        while True:
            output = queue.get()
            tokens = output.completions[0].token_ids
            assert tokens[: len(known)] == known
            known = tokens
            if output.finished:
                break
        assert output.error is None, output.error
        found.append(output)
    return found


def answers(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[one.token_ids for one in output.completions] for output in outputs]


@pytest.mark.parametrize("layout", [{"replicas": 2}, {"prefill": 1, "decode": 1}], ids=["replicas", "split"])
@pytest.mark.parametrize(
    "method", ["h2o", *(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "snapkv"))]
)
def test_the_outputs_of_one_engine(layout: dict[str, int], method: str) -> None:
    cache = CacheOptions(method=method, budget=budget_of(method))
    with LocalCluster(**layout) as local:
        outputs = local.llm.generate(PROMPTS, params(n=2), cache=cache)
        assert answers(outputs) == expected(method, 2)
        assert all(
            output.finished and output.prompt_token_ids == ids for output, ids in zip(outputs, PROMPTS, strict=True)
        )
        figures = local.llm.figures()
        assert figures.deaths == figures.replayed == 0
        if "decode" in layout:
            local.figure("moved", len(PROMPTS))
            assert local.llm.figures().moved_bytes > 0
            assert sorted(local.made[1].taken) == [f"{index}#0" for index in range(len(PROMPTS))]
        else:
            assert all(worker.sent for worker in local.made), "both have something to do"


@pytest.mark.parametrize(
    ("layout", "victim"),
    [({"replicas": 2}, 0), ({"prefill": 1, "decode": 1}, 1), ({"prefill": 1, "decode": 1}, 0)],
    ids=["replica", "decode", "prefill"],
)
def test_a_worker_that_dies_costs_no_token(layout: dict[str, int], victim: int) -> None:
    """One that decodes waits at 5 tokens and dies when they were sent; one that reads, when its bytes are pulled."""
    seen: dict[str, int] = {}

    with LocalCluster(**layout) as local:
        dies = local.made[victim]
        if dies.role == "prefill":
            local.made[1].on_take = lambda source: source.die() if source is dies else None
        else:
            dies.hold = 5

        def see(output: RequestOutput, worker: LocalWorker | None) -> None:
            count = sum(len(one.token_ids) for one in output.completions)
            assert count >= seen.get(output.request_id, 0), "what a client reads only grows"
            seen[output.request_id] = count
            if worker is dies and dies.hold and len(output.completions[0].token_ids) >= 5:
                dies.die()

        outputs = local.generate(PROMPTS, params(n=2), see)
        assert answers(outputs) == expected("h2o", 2)
        figures = local.llm.figures()
        assert figures.deaths == 1
        assert figures.replayed >= 1
        assert sorted(worker.role for worker in local.llm.workers()) == sorted(ClusterSettings(**layout).roles)
        again = [request for worker in local.made for request in worker.sent if request.known]
        assert again, "tokens that were sent are fed and not drawn"
        assert all(request.request_id.endswith("#1") for request in again), "late news of the lost worker is not theirs"
        local.settle()


def test_a_chunk_store_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="belongs to one engine"):
        mp.cluster.LLM("pond-recall", chunk_store=mp.ChunkStore(tmp_path), replicas=1)


def test_a_prompt_that_ends_its_workers_ends_alone() -> None:
    def watch(worker: LocalWorker, report: WorkerReport) -> None:
        if any(request.prompt == PROMPTS[2] for request in worker.sent):
            worker.die()

    with LocalCluster(watch, replicas=1, max_replays=1) as local:
        with pytest.raises(MillpondError, match=r"was lost 2 times with its worker .* max_replays=1 allows no more"):
            local.llm.generate([PROMPTS[2]], params())
        assert local.llm.figures().deaths == 2
        assert answers(local.llm.generate([PROMPTS[0]], params())) == expected()[:1]


def test_a_full_worker_is_tried_again_and_other_refusals_end_the_request() -> None:
    with LocalCluster(prefill=1, decode=1) as local:
        local.made[1].refuses = [PoolFullError("full"), PoolFullError("full")]
        assert answers(local.llm.generate([PROMPTS[0]], params())) == expected()[:1]
        local.made[1].refuses = [OptionError("not here")]
        with pytest.raises(OptionError, match="not here"):
            local.llm.generate([PROMPTS[0]], params())
        local.settle()


def test_without_room_for_bytes_a_request_decodes_where_it_was_read() -> None:
    with LocalCluster(prefill=1, decode=1, handoff_memory=1000) as local:
        assert answers(local.llm.generate(PROMPTS, params())) == expected()
        assert local.llm.figures().moved == 0
        local.settle()


@pytest.mark.parametrize(
    ("layout", "victim"), [({"replicas": 2}, 0), ({"prefill": 1, "decode": 2}, 1)], ids=["replicas", "split"]
)
def test_a_drained_worker_gives_its_requests_to_others(layout: dict[str, int], victim: int) -> None:
    """It holds its requests at 4 tokens, and goes on with none of them."""
    with LocalCluster(**layout) as local:
        drained = local.made[victim]
        drained.hold = 4
        ends = start(local, PROMPTS)
        dispatcher = local.cluster.dispatcher
        local.wait_until(lambda: any(one.unread == 0 for one in dispatcher.requests_of(drained.name)))
        done = local.cluster.loop.run(dispatcher.drain(drained.name))
        assert done.worker == drained.name
        assert done.moved >= 1
        assert drained.dead.is_set(), "it has ended"
        assert answers(finished(ends)) == expected()
        assert local.llm.figures().deaths == 0
        assert local.llm.figures().moved >= done.moved
        assert local.llm.figures().replayed == done.replayed
        taken = [name for worker in local.made for name in worker.taken]
        assert len(taken) >= local.llm.figures().moved
        local.wait_until(lambda: len(dispatcher.workers()) == len(ClusterSettings(**layout).roles))
        assert drained.name not in {worker.name for worker in local.llm.workers()}
        local.settle()


def test_the_only_worker_is_replaced_before_it_is_drained() -> None:
    with LocalCluster(replicas=1) as local:
        dispatcher, loop, drained = local.cluster.dispatcher, local.cluster.loop, local.made[0]
        with pytest.raises(OptionError, match="the only replica worker"):
            loop.run(dispatcher.drain("replica-0", replaced=False))
        with pytest.raises(OptionError, match="no worker 'replica-7' serves; those that do: replica-0"):
            loop.run(dispatcher.drain("replica-7"))
        drained.hold = 4
        ends = start(local, PROMPTS[:1])
        local.wait_until(
            lambda: dispatcher.requests_of("replica-0") and dispatcher.requests_of("replica-0")[0].unread == 0
        )
        assert loop.run(dispatcher.drain("replica-0")).moved == 1
        assert answers(finished(ends)) == expected()[:1]
        assert [worker.name for worker in local.llm.workers()] == ["replica-1"]
        assert dispatcher.live() == {"replica": 1}


def test_what_cannot_move_is_begun_again_and_costs_no_token() -> None:
    """Prompts that are being read, and requests whose bytes have no room."""
    with LocalCluster(replicas=2, handoff_memory=1000) as local:
        dispatcher, loop, drained = local.cluster.dispatcher, local.cluster.loop, local.made[0]
        drained.hold = 4
        ends = start(local, PROMPTS)
        local.wait_until(lambda: any(one.unread == 0 for one in dispatcher.requests_of("replica-0")))
        here = len(dispatcher.requests_of("replica-0"))
        done = loop.run(dispatcher.drain("replica-0", replaced=False))
        assert (done.moved, done.replayed) == (0, here)
        assert here >= 1
        assert answers(finished(ends)) == expected()
        assert [worker.name for worker in local.llm.workers()] == ["replica-1"]
        local.settle()


def test_a_request_that_is_not_fetched_within_its_lease_is_begun_again() -> None:
    """The worker that was chosen never answers; when it does after all, it has nothing of the request."""
    with LocalCluster(prefill=1, decode=2, lease_s=1.5) as local:
        stuck = local.made[1]
        stuck.answers = False
        assert answers(local.llm.generate(PROMPTS[:1], params())) == expected()[:1]
        local.figure("moved", 1)
        figures = local.llm.figures()
        assert (figures.replayed, figures.deaths) == (1, 0)
        assert local.made[2].taken == ["0#1"]
        local.cluster.loop.call(stuck.answer_now).result()
        local.wait_until(lambda: stuck.taken == ["0#0"])
        local.settle()


def test_a_request_that_ends_before_its_worker_has_answered_has_moved() -> None:
    with LocalCluster(prefill=1, decode=1) as local:
        decodes = local.made[1]
        decodes.late = True
        assert answers(local.llm.generate(PROMPTS[:1], params())) == expected()[:1]
        assert local.llm.figures().moved == 0
        local.cluster.loop.call(decodes.answer_now).result()
        local.figure("moved", 1)
        assert local.llm.figures().moved_bytes > 0
        local.settle()


def test_moves_that_are_not_taken_in_time_are_no_losses() -> None:
    """However many: after as many as `max_replays` allows losses the request decodes where it is read."""
    with LocalCluster(prefill=1, decode=3, lease_s=0.2, max_replays=1) as local:
        reads, *others = local.made
        for worker in others:
            worker.answers = False
        assert answers(local.llm.generate(PROMPTS[:1], params())) == expected()[:1]
        figures = local.llm.figures()
        assert (figures.replayed, figures.moved, figures.deaths) == (2, 0, 0)
        assert [one.request_id for one in reads.sent] == ["0#0", "0#1", "0#2"]
        for worker in others:
            local.cluster.loop.call(worker.answer_now).result()
        local.settle()


def test_a_watched_request_is_seen_wherever_it_runs_and_after_its_end() -> None:
    with LocalCluster(prefill=1, decode=1) as local:
        dispatcher, loop, holds = local.cluster.dispatcher, local.cluster.loop, local.made[1]
        holds.hold = 4
        ends = start(local, PROMPTS[:1], watch=True)
        local.wait_until(lambda: dispatcher.requests_of("decode-0"))
        requests = holds.engine._llm._engine._requests
        local.wait_until(lambda: any(len(state.completions[0].tokens) >= holds.hold for state in list(requests)))
        running = loop.run(dispatcher.memory("0", 0))
        assert running is not None
        assert loop.run(dispatcher.memory("0", 0, "")) == running
        assert loop.run(dispatcher.memory("0", 0, "another client")) is None
        holds.go.set()
        finished(ends)
        ended = loop.run(dispatcher.memory("0", 0))
        assert ended is not None
        assert loop.run(dispatcher.memory("0", 0, "")) == ended
        assert loop.run(dispatcher.memory("0", 0, "another client")) is None
        assert len(ended.token_ids) > len(running.token_ids) > len(PROMPTS[0])
        assert loop.run(dispatcher.memory("1", 0)) is None


def test_refused_prompts_and_names_in_use() -> None:
    with LocalCluster(replicas=2) as local:
        with pytest.raises(OptionError, match="the prompt is empty"):
            local.llm.generate([(5, 6), ()], params())
        with pytest.raises(OptionError, match="context holds"):
            local.llm.generate([tuple(range(3, 90)) * 5], params())
        dispatcher, loop = local.cluster.dispatcher, local.cluster.loop
        request = Request(request_id="x", prompt=PROMPTS[0], params=params())
        loop.call(lambda: dispatcher.submit(request, lambda _: None)).result()
        with pytest.raises(OptionError, match="'x' is in flight already"):
            loop.call(lambda: dispatcher.submit(request, lambda _: None)).result()
        loop.call(lambda: dispatcher.cancel("x")).result()
        local.settle()


@pytest.mark.parametrize("layout", [{"replicas": 1}, {"prefill": 1, "decode": 1}], ids=["replicas", "split"])
@pytest.mark.parametrize("n", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_cancelled_request_leaves_nothing(layout: dict[str, int], n: int) -> None:
    with LocalCluster(**layout) as local:
        dispatcher, loop, holds = local.cluster.dispatcher, local.cluster.loop, local.made[0 if n == 1 else -1]
        holds.hold = n
        outputs: SimpleQueue[RequestOutput] = SimpleQueue()
        request = Request(request_id="x", prompt=PROMPTS[1], params=params())
        loop.call(lambda: dispatcher.submit(request, outputs.put)).result()
        outputs.get()
        if n > 1:  # else the worker in which it is held may have offered it by now
            local.wait_until(lambda: any(one.place == "running" for one in dispatcher.requests_of(holds.name)))
        loop.call(lambda: dispatcher.cancel("x")).result()
        holds.go.set()
        while not (last := outputs.get()).finished:
            pass
        assert last.completions[0].finish_reason == "cancelled"
        assert last.completions[0].token_ids == expected()[1][0][: len(last.completions[0].token_ids)]
        assert 1 <= len(last.completions[0].token_ids) < NEW
        local.settle()


def test_the_async_llm_streams_what_grows() -> None:
    async def read(llm: AsyncClusterLLM) -> list[RequestOutput]:
        request = Request(request_id="x", prompt=PROMPTS[0], params=params())
        return [output async for output in llm.stream(request)]

    with LocalCluster(prefill=1, decode=1) as local:
        llm = AsyncClusterLLM.of(local.cluster, "tiny", None)
        outputs = asyncio.run(read(llm))
        assert answers(outputs[-1:]) == expected()[:1]
        assert outputs[-1].finished
        assert llm.trouble(1.0) is None
        assert (llm.vocab_size, llm.context_length, llm.cache.method) == (96, 256, "h2o")
        assert llm.stats().generated_tokens >= NEW
        asyncio.run(llm.close())


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"replicas": 0}, "replicas=0"),
        ({"prefill": 1}, "give decode too"),
        ({"decode": 2}, "give prefill too"),
        ({"replicas": 1, "prefill": 1, "decode": 1}, "leave one of the two out"),
        ({"max_replays": -1}, "max_replays=-1"),
        ({"hang_s": 0}, "hang_s=0"),
        ({"lease_s": 0}, "lease_s=0"),
        ({"handoff_memory": "much"}, "much"),
    ],
)
def test_settings_that_do_not_go_together(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(OptionError, match=rule):
        ClusterSettings(**given)


def test_an_address_elsewhere_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    for address in ("auto", "127.0.0.1:6379", "localhost:6379", "ray://127.0.0.1:10001"):
        check_address(address)
    with pytest.raises(OptionError, match="RAY_AUTH_MODE=token"):
        check_address("10.0.0.7:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check_address("10.0.0.7:6379")


def test_a_loaded_model_is_refused() -> None:
    with pytest.raises(OptionError, match="give its name or folder"):
        mp.cluster.LLM(shared_model("llama"))


def test_updates_that_come_late_or_twice_change_nothing() -> None:
    record = SentCompletion()
    first = CompletionDelta(0, (1, 2), 0, "ab", None, None, None, None)
    assert record.add(first)
    assert not record.add(first)
    assert record.add(CompletionDelta(1, (2, 3), 1, "bc", None, None, None, None))
    assert (record.tokens, record.text) == ([1, 2, 3], "abc")
    with pytest.raises(DataError, match="begins at token 5, and 3 are known"):
        record.add(CompletionDelta(5, (6,), 3, "", None, None, None, None))


def test_the_worker_with_the_least_to_do_gets_a_request() -> None:
    full = EngineStats(1, 0, 0, 90, 90, 100, 0, 0, 0, 0, 0, 0, 0)
    loads = [Load("a", "replica", 100, 1, None), Load("b", "replica", 0, 5, None), Load("c", "decode", 0, 0, None)]
    assert choose(loads, frozenset({"replica"})) == "b"
    assert choose([*loads, Load("d", "replica", 0, 0, full)], frozenset({"replica"}), 5) == "d"
    assert choose([*loads, Load("d", "replica", 0, 0, full)], frozenset({"replica"}), 50) == "b"
    assert choose(loads, frozenset({"prefill"})) is None
