"""Workers that take the other role when the load's shape changes: no token is lost or doubled. No Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

import millpond as mp
from millpond.cluster.messages import WorkerReport
from millpond.cluster.replan import LEAST, NEWEST, LoadShape, LoadWatch, PhaseSeconds, Replanner
from millpond.cluster.settings import ClusterSettings
from millpond.engine.cluster_figures import Role
from millpond.engine.outputs import EngineStats, RequestOutput
from millpond.engine.request import Request
from millpond.errors import MillpondError, OptionError
from tests.helpers.cluster.local import LocalCluster, LocalWorker
from tests.helpers.engine.helpers import prompt
from tests.helpers.hf.families import shared_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens
NEW = 12
SHORT, LONG = [prompt(15 + n % 3) for n in range(LEAST)], [prompt(60 + n % 9) for n in range(2 * LEAST)]


def params() -> mp.SamplingParams:
    return mp.SamplingParams(max_tokens=NEW, temperature=0.8, seed=7, ignore_eos=True)


def expected(prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The answers of one engine."""
    with mp.LLM(shared_model("llama"), method="h2o", budget="30%", max_step_tokens=16, page_slots=4) as llm:
        return [output.completions[0].token_ids for output in llm.generate(prompts, params())]


class Clients:
    """Requests to a cluster, and what came of each, step by step."""

    def __init__(self, local: LocalCluster) -> None:
        self._local, self._sent = local, 0

    def send(self, prompts: list[tuple[int, ...]]) -> list[SimpleQueue[RequestOutput]]:
        queues = [SimpleQueue[RequestOutput]() for _ in prompts]
        for text, queue in zip(prompts, queues, strict=True):
            request = Request(request_id=str(self._sent), prompt=text, params=params())
            self._sent += 1
            self._local.cluster.loop.call(
                lambda request=request, queue=queue: self._local.cluster.dispatcher.submit(request, queue.put)
            ).result()
        return queues

    @staticmethod
    def read(queues: list[SimpleQueue[RequestOutput]]) -> list[tuple[int, ...]]:
        found = []
        for queue in queues:
            known: tuple[int, ...] = ()
            while True:
                output = queue.get()
                assert output.error is None, output.error
                tokens = output.completions[0].token_ids
                assert tokens[: len(known)] == known
                known = tokens
                if output.finished:
                    break
            found.append(known)
        return found


def roles(local: LocalCluster) -> list[Role]:
    return sorted(one.role for one in local.llm.workers())


def test_a_decode_worker_reads_prompts_when_they_are_four_times_as_long() -> None:
    with LocalCluster(prefill=1, decode=3, replan_s=0.05) as local:
        clients = Clients(local)
        assert clients.read(clients.send(SHORT)) == expected(SHORT)
        replanner = local.cluster.dispatcher._replanner
        assert replanner is not None
        local.wait_until(lambda: replanner.load._planned is not None)
        assert roles(local) == ["decode", "decode", "decode", "prefill"], "the first load has the roles that were given"
        assert clients.read(clients.send(LONG)) == expected(LONG)
        local.wait_until(lambda: local.cluster.dispatcher.figures.role_changes >= 1)
        local.wait_until(lambda: all(one.state == "serving" for one in local.cluster.dispatcher.workers()))
        assert roles(local).count("prefill") >= 2
        assert local.cluster.dispatcher.live()["decode"] >= 1
        assert clients.read(clients.send(LONG[:4])) == expected(LONG[:4])
        assert local.llm.figures().deaths == 0
        local.settle()


@pytest.mark.parametrize(("victim", "role"), [(2, "prefill"), (1, "decode")])
def test_a_role_changes_in_the_middle_of_answers(victim: int, role: Role) -> None:
    """The worker holds its requests at 4 tokens, or reads prompts, and goes on with none of them."""
    with LocalCluster(prefill=2, decode=2) as local:
        changed, dispatcher, clients = local.made[victim], local.cluster.dispatcher, Clients(local)
        changed.hold = 4 if role == "prefill" else 1
        queues = clients.send(LONG[:8])
        local.wait_until(lambda: dispatcher.requests_of(changed.name))
        done = local.cluster.loop.run(dispatcher.drain(changed.name, role=role))
        assert done.moved + done.replayed >= 1
        assert changed.dead.is_set(), "it has ended"
        assert local.made[-1].role == role != changed.role
        assert roles(local).count(role) == 3
        assert clients.read(queues) == expected(LONG[:8])
        assert (dispatcher.figures.role_changes, dispatcher.figures.deaths) == (1, 0)
        local.settle()


def test_roles_that_cannot_be_taken() -> None:
    with LocalCluster(prefill=1, decode=2) as local:
        dispatcher, run = local.cluster.dispatcher, local.cluster.loop.run
        with pytest.raises(OptionError, match="the only prefill worker"):
            run(dispatcher.drain("prefill-0", role="decode"))
        with pytest.raises(OptionError, match="prefill and decode workers"):
            run(dispatcher.drain("decode-0", role="replica"))
        with pytest.raises(OptionError, match="leave one out"):
            run(dispatcher.drain("decode-0", replaced=False, role="prefill"))
        assert local.llm.figures().role_changes == 0
        assert len(local.made) == 3
    with pytest.raises(OptionError, match="replicas have one"):
        ClusterSettings(replicas=2, replan_s=1)


def test_a_worker_that_does_not_start_has_its_old_role_again() -> None:
    with LocalCluster(prefill=1, decode=2) as local:
        dispatcher, pool = local.cluster.dispatcher, local.cluster.dispatcher._pool
        made = pool._new

        def fails(role: Role) -> Any:
            pool._new = made  # type: ignore[method-assign]
            handle = made(role)
            handle.engine._options = {"method": "h2o", "budget": "no budget"}
            return handle

        pool._new = fails  # type: ignore[method-assign]
        with pytest.raises(MillpondError, match="no budget"):
            local.cluster.loop.run(dispatcher.drain("decode-1", role="prefill"))
        local.wait_until(lambda: dispatcher.live() == {"prefill": 1, "decode": 2})
        assert local.llm.figures().role_changes == 0


# ------------------------------------------------------------------ the decision


STATS = EngineStats(0, 0, 0, 0, 0, None, 0, 0, 0, 0, 0, 0, 0)


def look(load: LoadWatch, read: tuple[float, int], decoded: tuple[float, int]) -> Any:
    """What is told when workers report so many busy seconds and tokens."""
    for role, (busy_s, tokens) in (("prefill", read), ("decode", decoded)):
        stats = replace(STATS, prompt_tokens=tokens, generated_tokens=tokens)
        load.reported(role, role, WorkerReport((), stats, busy_s=busy_s))  # type: ignore[arg-type]
    return load.shifted()


def test_the_seconds_of_the_new_load_decide() -> None:
    load = LoadWatch()
    for _ in range(LEAST):
        load.finished(100, 10)
    assert look(load, (1.0, 1600), (1.0, 160)) is None, "the first load"
    for _ in range(NEWEST):
        load.finished(100, 10)
    for _ in range(NEWEST // 2):
        load.finished(200, 10)
    assert look(load, (3.0, 1600), (1.9, 160)) is None, "a shift is noticed, and its seconds are not those of the old"
    for _ in range(LEAST - 1):
        load.finished(400, 10)
    assert look(load, (3.0, 1600), (1.9, 160)) is None, "too few of the new load"
    load.finished(400, 10)
    assert look(load, (3.0, 1600), (1.9, 160)) is None, "no worker has said since what they cost"
    change, seconds = look(load, (7.0, 1600 + 4000), (2.9, 160 + 100))
    assert change == "The mean prompt went from 100 to 400 tokens."
    assert (seconds.prefill, seconds.decode) == (pytest.approx(0.4), pytest.approx(0.1))
    assert look(load, (99.0, 9600), (3.0, 300)) is None, "it is planned for"


@pytest.mark.parametrize(
    ("prefill", "decode", "workers", "now", "wanted"),
    [
        (4.0, 1.0, 4, 1, 3),
        (1.0, 4.0, 4, 3, 1),
        (1.0, 1.0, 4, 2, 2),
        (2.1, 2.0, 4, 2, 2),  # hardly better
        (1.0, 1.05, 5, 3, 3),  # 3 + 2 and 2 + 3 are alike
        (9.0, 0.1, 2, 1, 1),  # one of each stays
    ],
)
def test_the_busier_phase_has_more_workers(prefill: float, decode: float, workers: int, now: int, wanted: int) -> None:
    assert PhaseSeconds(prefill, decode).readers(workers, now) == wanted


def test_one_worker_changes_at_a_time_and_none_that_is_lost() -> None:
    able: dict[Role, list[str]] = {"prefill": ["prefill-0"], "decode": ["decode-0", "decode-1", "decode-2"]}
    changed: list[tuple[str, Role]] = []

    async def change(name: str, role: Role) -> None:
        if len(changed) == 1:
            raise OptionError(f"no worker {name!r} serves")
        changed.append((name, role))
        able["decode"].remove(name)
        able["prefill"].append("prefill-1")

    asyncio.run(Replanner(1.0, lambda: able, change)._balance("More.", PhaseSeconds(8.0, 1.0)))
    assert changed == [("decode-2", "prefill")]
    assert LoadShape.of([(1, 3), (3, 5)]) == LoadShape(2, 4)


def test_a_request_on_its_way_to_a_worker_that_is_drained_goes_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of its target is closed before it takes the request: the others have it, and no client hears of it."""
    with LocalCluster(prefill=1, decode=2) as local:
        dispatcher, clients = local.cluster.dispatcher, Clients(local)
        refused = []

        def watch(target: LocalWorker) -> None:
            take = target.take

            async def take_late(name: str, offered: Any) -> None:
                if not refused:
                    refused.append(target.name)
                    await dispatcher.drain(target.name)
                    raise MillpondError("the engine was closed and takes no requests any more")
                await take(name, offered)

            monkeypatch.setattr(target, "take", take_late)

        for one in local.made:
            watch(one)
        assert clients.read(clients.send(LONG[:3])) == expected(LONG[:3])
        assert refused, "a target was drained"
        assert refused[0] not in [one.name for one in local.llm.workers()]
        local.settle()
