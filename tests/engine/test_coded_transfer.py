"""Requests that move between engines in codes: fewer bytes, close answers, and strangers' bytes are refused."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from millpond.cache.coded import coder
from millpond.cluster.event_loop import BackgroundTasks
from millpond.cluster.worker_pool import WorkerPool
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.transfer.container import pack, unpack
from millpond.engine.transfer.request_snapshot import CODED, FORMAT
from millpond.errors import CacheMismatchError, DataError
from millpond.hf.calibration.transform import calibrate_transform
from tests.helpers.engine.coded import CODEC, agreement, answer, asked, engine_of, first_choices, prompt, run
from tests.helpers.hf.transform import ids, tiny, transform_of_tiny

N, NEW = 460, 40


def exported(engine: Engine, request: Any, at: int = 3) -> bytes:
    engine.add(request)
    run(engine, at)
    data = engine.export_request(request.request_id)
    assert engine.stats().kv_bytes == 0
    return data


def continued(engine: Engine, data: bytes) -> RequestOutput:
    name = engine.import_request(data)
    engine.check_integrity()
    return run(engine)[name]


@pytest.mark.parametrize(("kind", "options"), [("gqa", {}), ("sliding", {}), ("wide", {"codec": "int8"})])
def test_an_answer_goes_on_elsewhere_close_to_what_it_was(kind: str, options: dict[str, Any]) -> None:
    first, second = engine_of(kind, **options), engine_of(kind, **options)
    plain = engine_of(kind, storage_codec=None, **options)
    first.add(asked("alone", prompt(N, 3), NEW))
    expected = answer(run(first)["alone"])
    data = exported(first, asked("moved", prompt(N, 3), NEW, known=expected))
    raw = exported(plain, asked("moved", prompt(N, 3), NEW, known=expected))
    assert (unpack(data)[0]["format"], unpack(raw)[0]["format"]) == (CODED, FORMAT)
    assert len(data) < (0.4 if kind == "gqa" else 0.6) * len(raw)
    output = continued(second, data)
    assert agreement(first_choices(output), expected) >= 0.94
    assert answer(output) == expected
    kv = output.completions[0].kv
    assert kv is not None
    assert (kv.decoded_tokens, kv.exact) == (N, False)
    for engine in (first, second, plain):
        engine.close()


def test_codes_travel_on_as_they_are() -> None:
    first, second = engine_of(), engine_of()
    data = exported(first, asked("moved", prompt(N, 3), 60), 3)
    second.import_request(data)
    run(second, 40)
    again = second.export_request("moved")
    one, two = unpack(data)[1], unpack(again)[1]
    pages = [name for name in one if name.endswith("pages")]
    assert pages
    for name in pages:
        assert torch.equal(two[name][: len(one[name])], one[name])
        assert len(two[name]) > len(one[name])
    assert len(answer(continued(first, again))) == 60
    first.close()
    second.close()


def test_a_copy_goes_on_from_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is new is coded, and the request that was copied is as exact as before."""
    engine, coded = engine_of(), []

    def counting(code: Any) -> Any:
        def counted(layer: Any, header: Any, x: Any, address: Any) -> Any:
            coded.append(len(x[0]))
            return code(layer, header, x, address)

        return counted

    for name in ("encode", "encode_tokens"):  # under a header that follows from these tokens, and under a known one
        monkeypatch.setattr(coder, name, counting(getattr(coder, name)))
    engine.add(asked("copied", prompt(N, 3), 120))
    run(engine, 3)
    first = engine.checkpoint("copied")
    assert first is not None
    assert coded == [(N + 2 - 64) // 32 * 32] * 2
    run(engine, 80)
    second = engine.checkpoint("copied")
    assert second is not None
    assert coded[2:] == [((N + 79 - 64) // 32 - (N + 2 - 64) // 32) * 32] * 2
    output = run(engine)["copied"]
    kv = output.completions[0].kv
    assert kv is not None
    assert kv.exact
    other = engine_of()
    assert len(answer(continued(other, second))) == 120
    engine.close()
    other.close()


def test_several_answers_move() -> None:
    first, second = engine_of(), engine_of()
    output = continued(second, exported(first, asked("moved", prompt(N, 3), NEW, n=2), 5))
    assert [len(answer(output, index)) for index in range(2)] == [NEW, NEW]
    first.close()
    second.close()


def test_exact_requests_move_as_they_are() -> None:
    engine = engine_of()
    data = exported(engine, asked("moved", prompt(N, 3), NEW, prompt_logprobs=1))
    assert unpack(data)[0]["format"] == FORMAT
    assert len(answer(continued(engine, data))) == NEW
    engine.close()


def other_transform() -> Any:
    return calibrate_transform(tiny("gqa"), [ids(512, seed) for seed in (11, 12)], length=512)


def test_codes_of_another_transform_are_refused() -> None:
    first = engine_of()
    data = exported(first, asked("moved", prompt(N, 3), NEW))
    for options, words in (
        ({"calibration": other_transform()}, "same transform file"),
        ({"storage_codec": "transform:2"}, "same transform file"),
        ({"storage_codec": None}, "no storage codec"),
    ):
        second = engine_of(**options)
        with pytest.raises(CacheMismatchError, match=words):
            second.import_request(data)
        assert not second.busy
        second.close()
    first.close()


@pytest.mark.parametrize("part", ["pages", "header", "first", "segments", "shape", "format"])
def test_hostile_bytes_leave_nothing_behind(part: str) -> None:
    engine = engine_of()
    about, tensors = unpack(exported(engine, asked("moved", prompt(N, 3), NEW)))
    if part == "pages":
        tensors["cache.0.codes.1.0.pages"][2, 30] ^= 8
    elif part == "header":
        tensors["cache.0.codes.0.0.key_header"] = tensors["cache.0.codes.0.0.key_header"][:-1].clone()
    elif part == "first":
        tensors["cache.0.codes.1.first"] = torch.tensor(1 << 60)
    elif part == "segments":
        tensors["cache.0.codes.segments"] = torch.tensor([[0, 1 << 60, 1 << 60, 1]])
    elif part == "shape":
        del tensors["cache.0.1.shape"]
    else:
        del about["codes"]
    with pytest.raises(DataError):
        engine.import_request(pack(about, tensors))
    assert not engine.busy
    assert engine.stats().kv_bytes == 0
    engine.check_integrity()
    engine.close()


def test_others_go_on_while_a_request_is_coded_and_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def noting(call: Any) -> Any:
        def noted(*args: Any) -> Any:
            threads.append(threading.current_thread().name)
            return call(*args)

        return noted

    for name in ("code", "decode"):
        monkeypatch.setattr(coder.TextCoder, name, noting(getattr(coder.TextCoder, name)))

    async def move() -> list[RequestOutput]:
        options = {"storage_codec": CODEC, "calibration": transform_of_tiny("gqa"), "prefix_cache": False}
        config = EngineConfig(method="full", codec="auto", **options)
        first, second = (AsyncLLM(tiny("gqa"), config, model_name="tiny") for _ in range(2))
        outputs = first.stream(asked("moved", prompt(N, 3), 200))
        await anext(outputs)
        data = await first.export_request("moved")
        found = [output async for output in await second.import_request(data)]
        await first.close()
        await second.close()
        return found

    assert len(answer(asyncio.run(move())[-1])) == 200
    assert len(threads) == 2
    assert "millpond-engine" not in threads


def test_a_request_that_is_coded_has_left() -> None:
    engine = engine_of()
    engine.add(asked("moved", prompt(N, 3), NEW))
    engine.add(asked("stays", prompt(N, 4), NEW))
    run(engine, 3)
    coming = engine.begin_export("moved")
    output = run(engine)
    assert list(output) == ["stays"]
    assert len(answer(continued(engine, coming.result()))) == NEW
    engine.close()


class Worker:
    """A worker that opens with the mark of some codes."""

    def __init__(self, name: str, codes: str | None) -> None:
        self.name, self.role, self.pid, self.node, self.codes, self.killed = name, "replica", 0, "", codes, False

    async def open(self) -> Any:
        return 10, 10, None, self.codes

    async def report(self, wanted: Any) -> Any:
        raise AssertionError("it serves nothing")

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize("marks", [("a", "b"), ("a", None), (None, "b")])
def test_workers_compare_their_transforms_when_they_connect(marks: tuple[str | None, str | None]) -> None:
    workers: list[Worker] = []

    def make(name: str, role: Any) -> Any:
        workers.append(Worker(name, marks[len(workers)]))
        return workers[-1]

    pool = WorkerPool(("prefill", "decode"), make, BackgroundTasks(lambda error: None), None)  # type: ignore[arg-type]
    with pytest.raises(CacheMismatchError, match="the same storage_codec and the same transform file"):
        asyncio.run(pool.open())
    assert all(worker.killed for worker in workers)
    assert not pool.serving
