"""Requests that go on from a copy of their caches where their worker dies. Workers in one process, no clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import millpond as mp
from millpond.cluster.settings import ClusterSettings
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.transfer.request_snapshot import RequestSnapshot
from millpond.errors import DataError, OptionError, PoolFullError
from tests.cluster.test_dispatch import NEW, PROMPTS, answers, expected, finished, params, start
from tests.helpers.cluster.local import LocalCluster, LocalWorker
from tests.helpers.hf.families import shared_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens
HELD = 8  # tokens at which a worker waits
EVERY = 3


def copied(local: LocalCluster, worker: LocalWorker) -> bool:
    """Whether a request at a worker has as many tokens as it gets there, and one has a copy."""
    copies = local.cluster.dispatcher.checkpoints._copies
    found = [copies.get(entry.request.request_id) for entry in local.cluster.dispatcher.requests_of(worker.name)]
    return any(one is not None and one.key is not None for one in found) and ready(local, worker)


def ready(local: LocalCluster, worker: LocalWorker) -> bool:
    """Whether the engine of a worker waits with a first request, whose tokens were sent."""
    return any(entry.length >= worker.hold for entry in local.cluster.dispatcher.requests_of(worker.name))


def lose(local: LocalCluster, worker: LocalWorker) -> None:
    local.cluster.loop.call(worker.die).result()


@pytest.mark.parametrize(
    ("layout", "victim"), [({"replicas": 2}, 0), ({"prefill": 1, "decode": 1}, 1)], ids=["replicas", "split"]
)
def test_a_lost_request_goes_on_from_its_copy(layout: dict[str, int], victim: int) -> None:
    """No prompt is read a second time, and what is fed are the tokens that came after the copy."""
    with LocalCluster(checkpoint_tokens=EVERY, **layout) as local:
        dies, dispatcher = local.made[victim], local.cluster.dispatcher
        dies.hold = HELD
        ends = start(local, PROMPTS[:3])
        local.wait_until(lambda: copied(local, dies))
        here = len(dispatcher.requests_of(dies.name))
        lose(local, dies)
        assert answers(finished(ends)) == expected()[:3]
        local.figure("resumed", here - local.llm.figures().replayed)  # one that had no copy yet is read again
        figures = local.llm.figures()
        assert figures.deaths == 1
        assert figures.resumed >= 1
        assert figures.checkpoints >= figures.resumed
        assert figures.checkpoint_bytes > 0
        resumed = [request for worker in local.made for request in worker.resumed]
        assert len(resumed) == figures.resumed
        assert all(request.known and request.known[0] for request in resumed)
        again = {request.request_id for worker in local.made for request in worker.sent}
        assert not again & {request.request_id for request in resumed}, "what has a copy is not read again"
        local.settle()
        assert dispatcher.checkpoints.size == 0


def test_a_request_that_ends_before_its_worker_has_answered_is_counted() -> None:
    with LocalCluster(replicas=2, checkpoint_tokens=EVERY) as local:
        dies, other = local.made
        dies.hold, other.late = HELD, True
        ends = start(local, PROMPTS[:1])
        local.wait_until(lambda: copied(local, dies))
        lose(local, dies)
        assert answers(finished(ends)) == expected()[:1]
        assert local.llm.figures().resumed == 0
        local.cluster.loop.call(other.answer_now).result()
        local.figure("resumed", 1)
        local.settle()


def test_several_answers_and_a_second_death() -> None:
    """The copy stays until there is a newer one."""
    with LocalCluster(replicas=1, checkpoint_tokens=EVERY, holds=(HELD, HELD + EVERY)) as local:
        request = Request(request_id="x", prompt=PROMPTS[1], params=params(n=2))
        last: list[Any] = []
        local.cluster.loop.call(lambda: local.cluster.dispatcher.submit(request, last.append)).result()
        for number in range(2):
            local.wait_until(lambda number=number: len(local.made) > number and copied(local, local.made[number]))
            local.figure("resumed", number)
            lose(local, local.made[number])
        local.wait_until(lambda: bool(last) and last[-1].finished)
        assert answers(last[-1:]) == [expected("h2o", 2)[1]]
        local.figure("resumed", 2)
        assert local.llm.figures().replayed == 0
        assert local.cluster.dispatcher.checkpoints.size == 0


def test_copies_never_take_more_than_their_limit_and_requests_do_without() -> None:
    with LocalCluster(replicas=2, checkpoint_tokens=EVERY, handoff_memory=1000) as local:
        dies = local.made[0]
        dies.hold = HELD
        ends = start(local, PROMPTS)
        local.wait_until(lambda: ready(local, dies))
        assert local.cluster.dispatcher.checkpoints.size == 0
        lose(local, dies)
        assert answers(finished(ends)) == expected()
        assert local.llm.figures().checkpoints == local.llm.figures().resumed == 0
        assert local.llm.figures().replayed >= 1
        local.settle()


def test_a_full_worker_is_tried_again_and_one_that_refuses_reads_the_prompt() -> None:
    for refusals, resumed in (([PoolFullError("full")] * 2, 1), ([DataError("torn")], 0)):
        with LocalCluster(replicas=2, checkpoint_tokens=EVERY) as local:
            dies = local.made[0]
            dies.hold = HELD
            ends = start(local, PROMPTS[:1])
            local.wait_until(lambda dies=dies, local=local: copied(local, dies))
            local.made[1].refuses = list(refusals)
            lose(local, dies)
            assert answers(finished(ends)) == expected()[:1]
            local.figure("resumed", resumed)
            assert sum(len(worker.sent) for worker in local.made[1:]) == 1 - resumed
            local.settle()
            assert local.cluster.dispatcher.checkpoints.size == 0


def test_a_cancelled_request_leaves_no_copy() -> None:
    with LocalCluster(replicas=1, checkpoint_tokens=EVERY) as local:
        dispatcher, holds = local.cluster.dispatcher, local.made[0]
        holds.hold = HELD
        ends = start(local, PROMPTS[:1])
        local.wait_until(lambda: copied(local, holds))
        assert dispatcher.checkpoints.size > 0
        local.cluster.loop.call(lambda: dispatcher.cancel("0")).result()
        local.wait_until(lambda: dispatcher.checkpoints.size == 0)  # one more copy may be under way
        holds.go.set()
        assert finished(ends)[0].completions[0].finish_reason == "cancelled"
        local.settle()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_a_number_of_tokens_that_is_none(wrong: Any) -> None:
    with pytest.raises(OptionError, match="checkpoint_tokens="):
        ClusterSettings(checkpoint_tokens=wrong)


def test_a_copy_leaves_its_request_as_it_is_and_feeds_what_came_after_it() -> None:
    first, second = (
        Engine(shared_model("llama"), method="h2o", budget="30%", max_step_tokens=16, page_slots=slots)
        for slots in (4, 8)
    )
    first.add(Request(request_id="a", prompt=PROMPTS[0], params=params()))
    assert first.checkpoint("a") is None, "its prompt is not read"
    assert first.checkpoint("b") is None
    while not first._requests["a"].completions[0].tokens or len(first._requests["a"].completions[0].tokens) < 4:
        first.step()
    data = first.checkpoint("a")
    assert data is not None
    tokens = tuple(first.drain()[0].completions[0].token_ids)
    assert [tokens] == expected()[0], "the copy changed nothing"
    known = (tokens[:7],)
    second.import_request(data, Request(request_id="b", prompt=PROMPTS[0], params=params(), known=known))
    assert second._sampler.known_of(second._requests["b"].completions[0].key) == tokens[4:7]
    assert tuple(second.drain()[0].completions[0].token_ids) == tokens
    assert second.stats().kv_bytes == first.stats().kv_bytes == 0
    assert len(tokens) == NEW
    wrong = ((tokens[0] + 1, *tokens[1:]),)
    with pytest.raises(DataError, match="other tokens than its client"):
        second.import_request(data, Request(request_id="c", prompt=PROMPTS[0], params=params(), known=wrong))
    two = ((1,), (2,))
    with pytest.raises(DataError, match="2 answers are known"):
        RequestSnapshot.from_bytes(data).continued_as(
            Request(request_id="c", prompt=PROMPTS[0], params=mp.SamplingParams(n=2), known=two)
        )
    torn = np.frombuffer(data, dtype=np.uint8).copy()
    torn[-1] ^= 1
    with pytest.raises(DataError):
        second.import_request(torn.data, Request(request_id="d", prompt=PROMPTS[0], params=params()))
    assert not second.busy
