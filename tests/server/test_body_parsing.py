"""Bodies that are made to take long: refused before anything is built of them, and the event loop goes on."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from millpond.server import app, body_parsing, tokenizer_worker
from millpond.server.app import create_app
from millpond.server.body_parsing import ParsedRoute, count_outside_strings
from millpond.server.client_pacing import in_thread
from millpond.server.messages import Message
from millpond.server.routes import chat, completions, info, ui
from millpond.server.schemas import ChatFields
from millpond.server.settings import ServerSettings
from millpond.server.text_reader import TextReader
from server.test_refusals import send
from tests.helpers.server.fake import FakeLLM
from tests.helpers.server.hostile import BODIES, MOST_ITEMS
from tests.helpers.server.live import Live, live


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeLLM) as running:
        yield running


def longest_wait(server: Live, path: str, body: bytes) -> tuple[httpx.Response, float]:
    """The answer, and the most seconds for which the server's event loop did nothing else."""
    gaps = [0.0]
    done = asyncio.Event()

    async def watch() -> None:
        while not done.is_set():
            before = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - before)

    server.soon(lambda: setattr(server, "watching", asyncio.ensure_future(watch())))
    with server.client() as client:
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    server.soon(done.set)
    return answer, max(gaps)


@pytest.mark.parametrize("name", BODIES)
def test_no_body_stops_the_event_loop(server: Live, name: str) -> None:
    path, make, status = BODIES[name]
    body = make().encode()
    assert len(body) <= ServerSettings().max_body_bytes
    assert ServerSettings().max_body_items == MOST_ITEMS
    waits = []
    for _ in range(15):  # another process may have had the processor
        answer, wait = longest_wait(server, path, body)
        assert answer.status_code == status, answer.text[:300]
        if status != 200:
            assert len(answer.content) < 3_000
        waits.append(wait)
        if wait < 0.1:
            return
    pytest.fail(f"the event loop stood still for {min(waits):.2f} s")


def test_every_route_with_a_body_parses_it_away_from_the_loop() -> None:
    checked = 0
    service = create_app(FakeLLM()).state.service
    for router in (*(part.routes(service) for part in (completions, chat, info)), ui.routes(needs_key=False)):
        for route in router.routes:
            assert isinstance(route, APIRoute)
            if route.body_field is not None:
                assert isinstance(route, ParsedRoute), route.path
                checked += 1
    assert checked >= 5


def test_limits_are_the_settings_and_texts_do_not_count() -> None:
    body = {"prompt": "w5", "max_tokens": 2, "metadata": {f"a{n}": "[,{:" * 120 for n in range(9)}}
    assert send(json.dumps(body).encode(), max_body_items=160).status_code == 200
    found = send(json.dumps(body | {"stop": ["w9"] * 161}).encode(), max_body_items=160)
    assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")
    assert "160 values" in found.json()["error"]["message"]


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=8) | st.sampled_from(['"', '\\"', "\\\\", ",", "[{:"]),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=12,
    ),
    st.booleans(),
    st.sampled_from([1, 2, 3, 7, 2**16]),
)
def test_counts_are_those_of_the_parsed_text(value: Any, ascii_: bool, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_parsing, "_PIECE", piece)
        found = count_outside_strings(json.dumps(value, ensure_ascii=ascii_).encode("utf-8", "surrogatepass"), 10**9)
    keys, nests, commas = numbers(value)
    assert (found.keys, found.nests, found.values) == (keys, nests, commas + nests)


def numbers(value: Any) -> tuple[int, int, int]:
    """Keys, arrays and objects, and commas."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [numbers(part) for part in (value.values() if isinstance(value, dict) else value)]
    own = (len(value) if isinstance(value, dict) else 0, 1, max(len(value) - 1, 0))
    return tuple(sum(parts) for parts in zip(own, *inner, strict=True))  # type: ignore[return-value]


def test_a_long_text_goes_to_another_thread_than_short_ones(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    service = server.server._service
    monkeypatch.setattr(service.tokens._short, "_max_length", 2**20)
    begun, goes_on = threading.Event(), threading.Event()
    plain = service.tokens._short.tokenizer.encode

    class Slow:
        def encode(self, text: str, **options: Any) -> Any:
            begun.set()
            assert goes_on.wait(30)
            return plain("w5", **options)

    long = TextReader(Slow(), service.tokens.shown, 2**20, is_short=False)
    monkeypatch.setattr(service.tokens, "_long", long)
    with server.client() as client:
        thread = asyncio.run_coroutine_threadsafe(service.tokens.encode("w5 " * 2**15), server.loop)
        assert begun.wait(30)
        assert client.post("/tokenize", json={"prompt": "w5"}).status_code == 200
        assert not thread.done()
        goes_on.set()
        thread.result(30)


def test_a_chat_enters_the_tokenizer_once_whatever_is_marked(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[TextReader] = []

    async def counted(executor: Any, work: Any, reader: TextReader) -> Any:
        entries.append(reader)
        return await in_thread(executor, work, reader)

    monkeypatch.setattr(tokenizer_worker, "in_thread", counted)
    kept = {"role": "user", "content": "w5 w6", "millpond": {"keep": True}}
    forgotten = {"role": "user", "content": "w7 w8"}
    body = {"messages": [kept, forgotten], "max_tokens": 1, "millpond": {"forget": ["message:1"], "forgotten": True}}
    with server.client() as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    tokens = server.server._service.tokens
    assert entries == [tokens._short]


def test_a_chat_that_its_template_makes_long_is_read_with_long_texts(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of messages are as many characters as their texts: 6,000 short messages make a long text."""
    tokens = server.server._service.tokens
    for reader in (tokens._short, tokens._long):
        if reader is not None:
            monkeypatch.setattr(reader, "_max_length", 2**20)
    monkeypatch.setattr(tokens, "_max_length", 2**20)
    messages = [Message(role="user", content="w5")] * 6_000
    readers: list[TextReader] = []
    plain = TextReader.chat

    def chat(reader: TextReader, *arguments: Any) -> Any:
        readers.append(reader)
        return plain(reader, *arguments)

    monkeypatch.setattr(TextReader, "chat", chat)
    coming = asyncio.run_coroutine_threadsafe(tokens.chat(messages, ChatFields()), server.loop)
    text, ids = coming.result(60)
    assert len(text) > 2**15 > 2 * len(messages)
    assert ids == tuple(tokens._short.tokenizer.encode(text))
    assert readers == [tokens._short, tokens._long]


def test_a_model_instance_passes_a_route_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[BaseModel] = []
    plain = body_parsing._parsed
    monkeypatch.setattr(body_parsing, "_parsed", lambda raw, kind: made.append(plain(raw, kind)) or made[-1])
    seen: list[BaseModel] = []
    plain_job = completions.call_of
    monkeypatch.setattr(completions, "call_of", lambda service, body: seen.append(body) or plain_job(service, body))
    assert send(b'{"prompt": "w5", "max_tokens": 2}').status_code == 200
    assert len(made) == len(seen) == 1
    assert made[0] is seen[0]  # checked once, not again in the event loop


def test_what_requests_have_left_in_the_heap_is_given_back() -> None:
    class Counts:  # what was counted at each look
        looks = iter([0, 0, 2, 2, 3])
        begun: ClassVar[list[int]] = []

        @property
        def requests(self) -> int:
            self.begun.append(next(self.looks, -1))
            if self.begun[-1] < 0:
                raise asyncio.CancelledError
            return self.begun[-1]

    given: list[int] = []
    counts: Any = Counts()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(app._tidy(counts, lambda: given.append(counts.begun[-1]), 0))
    assert given == [2, 3], "once for each look that saw new requests"


def test_the_app_gives_the_heap_back_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[Any, ...]] = []

    async def tidy(*parts: Any) -> None:
        begun.append(parts)

    monkeypatch.setattr(app, "_tidy", tidy)
    with live(FakeLLM):
        pass
    assert len(begun) == 1
    assert begun[0][1:] == (app.give_back, app._TIDY_S)
