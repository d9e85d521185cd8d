"""Functions of the owner's that run with the engines of workers. No Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.cluster.async_llm import AsyncClusterLLM
from millpond.cluster.handle import WorkerLostError
from millpond.cluster.ray_worker import RayWorker
from millpond.engine.async_llm import AsyncLLM
from millpond.errors import OptionError
from tests.cluster.test_dispatch import PROMPTS, params
from tests.helpers.cluster.local import LocalCluster

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens


async def size_of(llm: AsyncLLM, factor: int) -> tuple[int, int]:
    """What a caller can tell: the function has this worker's engine, in its thread, and its arguments."""
    return id(llm), await llm.call(lambda engine: factor * engine.vocab_size)


async def refuses(llm: AsyncLLM) -> None:
    raise OptionError("not like this")


async def waits(llm: AsyncLLM) -> None:
    await asyncio.Event().wait()


def at_once(llm: AsyncLLM) -> int:
    return 1


@pytest.fixture
def local() -> Iterator[LocalCluster]:
    with LocalCluster(replicas=2) as made:
        yield made


def test_each_worker_runs_it_with_its_own_engine(local: LocalCluster) -> None:
    llm = AsyncClusterLLM.of(local.cluster, "tiny", None)
    engines = [id(worker.engine._llm) for worker in sorted(local.made, key=lambda worker: worker.name)]
    expected = [(one, 3 * llm.vocab_size) for one in engines]
    assert asyncio.run(llm.call_workers(size_of, 3)) == expected
    assert asyncio.run(llm.call_workers(size_of, 3, most=1)) == expected[:1]
    outputs = local.generate(PROMPTS, params(), lambda *_: None)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)


def test_what_it_raises_comes_back_and_workers_go_on(local: LocalCluster) -> None:
    llm = AsyncClusterLLM.of(local.cluster, "tiny", None)
    with pytest.raises(OptionError, match="not like this"):
        asyncio.run(llm.call_workers(refuses))
    assert len(asyncio.run(llm.call_workers(size_of, 1))) == 2
    assert local.llm.figures().deaths == 0


def test_a_worker_that_dies_meanwhile_is_lost(local: LocalCluster) -> None:
    llm = AsyncClusterLLM.of(local.cluster, "tiny", None)

    async def call() -> None:
        asked = asyncio.ensure_future(llm.call_workers(waits))
        await asyncio.sleep(0.01)
        local.cluster.loop.call(local.made[0].die)
        await asked

    with pytest.raises(WorkerLostError):
        asyncio.run(call())


@pytest.mark.parametrize("kind", ["lambda", "local", "method", "replaced"])
def test_a_function_that_workers_cannot_import_is_refused(
    kind: str, local: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def inside(llm: AsyncLLM) -> None: ...

    functions: dict[str, Any] = {"lambda": lambda llm: None, "local": inside, "method": local.made[0].engine.call}
    functions["replaced"] = refuses
    if kind == "replaced":
        monkeypatch.setitem(globals(), "refuses", waits)
    llm = AsyncClusterLLM.of(local.cluster, "tiny", None)
    with pytest.raises(OptionError, match=r"not at the top of a module, where workers find it: define it there"):
        asyncio.run(llm.call_workers(functions[kind]))


def test_a_function_that_is_not_async_is_refused(local: LocalCluster) -> None:
    llm: Any = AsyncClusterLLM.of(local.cluster, "tiny", None)
    with pytest.raises(OptionError, match="at_once is not async, and workers await it: define it with async def"):
        asyncio.run(llm.call_workers(at_once))


def test_another_process_is_sent_its_name() -> None:
    """And not its code: what goes to Ray, as a pickle, is the name of its module and its own."""
    sent: list[bytes] = []

    def remote(*message: Any) -> Any:
        sent.append(pickle.dumps(message))
        answer = asyncio.get_running_loop().create_future()
        answer.set_result("done")
        return answer

    worker: Any = RayWorker.__new__(RayWorker)
    worker._actor = SimpleNamespace(call=SimpleNamespace(remote=remote))
    worker._ray = SimpleNamespace(exceptions=SimpleNamespace(RayTaskError=ValueError, RayError=ValueError))

    async def call() -> Any:
        return await worker.call(size_of, 3)

    assert asyncio.run(call()) == "done"
    (message,) = sent
    assert pickle.loads(message) == (size_of, 3)
    assert b"vocab_size" not in message
    assert len(message) < 120
