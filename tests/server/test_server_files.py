"""What clients hear of the server's files: nothing, whatever fails; its log says it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond.cache import swap
from millpond.codec import list_codecs
from millpond.engine.async_llm import AsyncLLM
from millpond.errors import DataError, MillpondError
from millpond.methods import METHODS
from millpond.server.errors import _STATUS, ApiError
from tests.helpers.evals.small import text, tiny_model, tiny_tokenizer
from tests.helpers.server.fake import FakeLLM, client_of
from tests.helpers.server.live import live

PATH = "/srv/models/0.safetensors"


def kinds(base: type[MillpondError]) -> Iterator[type[MillpondError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


#: Errors whose texts are about what a client sent, or about the model: nothing of files is in them.
ABOUT_REQUESTS = tuple(kind for kind, status, _ in _STATUS if status < 500)


def test_errors_of_files_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    checked = 0
    for kind in set(kinds(DataError)):
        with caplog.at_level(logging.ERROR):
            told = ApiError.of(kind(f"{PATH!r} cannot be read"))
        assert (told.status, told.code) == (500, "file_failed")
        assert PATH not in str(told.body())
        assert PATH in caplog.text
        checked += 1
    assert checked >= 1
    assert not issubclass(DataError, ABOUT_REQUESTS)


@pytest.mark.parametrize("stream", [False, True])
def test_in_answers_and_in_streams(stream: bool) -> None:
    llm = FakeLLM()
    llm.fails = DataError(f"{PATH!r} cannot be read")

    async def work() -> Any:
        async with client_of(llm) as client:
            return await client.post("/v1/completions", json={"prompt": "w5", "max_tokens": 3, "stream": stream})

    found = asyncio.run(work())
    assert found.status_code == (200 if stream else 500)
    assert "file_failed" in found.text
    assert "safetensors" not in found.text


def own_paths(*more: Path) -> tuple[str, ...]:
    """Beginnings of what lies on this machine."""
    return (str(Path(millpond.__file__).parent), os.getcwd(), str(Path.home()) + os.sep, *map(str, more))


def test_every_method_and_codec_as_a_client_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def engine() -> AsyncLLM:
        return AsyncLLM(tiny_model(), tokenizer=tiny_tokenizer(), method="h2o", budget=16, swap_to=tmp_path)

    refused = 0
    with live(engine) as server, server.client() as client:
        for kept in [{"method": name} for name in METHODS.names()] + [{"codec": name} for name in list_codecs()]:
            for options in ({}, {"budget": 1}, {"options": {"score": "none/heads=x"}}):
                body = {"prompt": "w5 w6 w7", "max_tokens": 1, "millpond": kept | options}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code in (200, 400, 422), answer.text
                refused += answer.status_code != 200
                assert not any(path in answer.text for path in own_paths(tmp_path)), answer.text
    assert refused > 20


def test_a_full_disk_ends_a_request_and_names_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: object, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    def engine() -> AsyncLLM:
        return AsyncLLM(
            tiny_model(), tokenizer=tiny_tokenizer(), method="full", kv_memory="40kB", overcommit=4, swap_to=tmp_path
        )

    monkeypatch.setattr(swap, "save_file", full)
    with live(engine) as server, server.client() as client, ThreadPoolExecutor(6) as threads:

        def ask(number: int) -> Any:
            body = {"prompt": text(20, number), "max_tokens": 30, "ignore_eos": True}
            return client.post("/v1/completions", json=body)

        answers = list(threads.map(ask, range(6)))
    failed = [answer for answer in answers if answer.status_code == 500]
    assert failed
    for answer in failed:
        assert answer.json()["error"]["code"] == "file_failed"
        assert str(tmp_path) not in answer.text
        assert "safetensors" not in answer.text
    assert any(answer.status_code == 200 for answer in answers)
    assert str(tmp_path) in caplog.text
