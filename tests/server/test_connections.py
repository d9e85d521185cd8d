"""Connections that keep the server waiting: closed in time, bounded in number, and nothing of them is kept."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from millpond.server.middleware import BodyLimitMiddleware
from tests.helpers.server.fake import FakeLLM
from tests.helpers.server.live import Live, live, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "w5", "max_tokens": 2}'


@contextmanager
def connected(server: Live, sent: bytes = b"") -> Iterator[socket.socket]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as made:
        made.sendall(sent)
        yield made


def rest(made: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    try:
        while part := made.recv(2**16):
            found += part
    except ConnectionResetError:
        pass
    return found


def sends_until_closed(made: socket.socket, piece: bytes, pause_s: float, most: int) -> int:
    """How often a piece can be sent, at most so often."""
    for number in range(most):
        try:
            made.sendall(piece)
        except OSError:  # reset, or a broken pipe
            return number
        time.sleep(pause_s)
    return most


def bodies_of(server: Live) -> BodyLimitMiddleware:
    layer: Any = server.server.config.app.middleware_stack
    while not isinstance(layer, BodyLimitMiddleware):
        layer = getattr(layer, "_app", None) or layer.app
    return layer


@pytest.mark.parametrize("begun", [b"", b"POST /v1/comp", HEAD, HEAD + b"X: " + b"x" * 5_000])
def test_a_header_that_does_not_come_in_time(begun: bytes) -> None:
    with live(FakeLLM, header_timeout_s=0.3) as server, connected(server, begun) as made:
        began = time.monotonic()
        assert rest(made) == b""
        assert 0.2 < time.monotonic() - began < 5


def test_a_header_that_comes_drop_by_drop() -> None:
    with live(FakeLLM, header_timeout_s=0.3) as server, connected(server) as made:
        assert sends_until_closed(made, b"G", 0.02, 250) < 250
        with server.client() as client:
            assert client.get("/health").status_code == 200


def test_a_header_without_end_is_not_kept() -> None:
    with live(FakeLLM) as server, connected(server, HEAD) as made:
        assert sends_until_closed(made, b"X: " + b"x" * 1_000 + b"\r\n", 0.001, 2_000) < 2_000
        with server.client() as client:
            assert client.get("/health").status_code == 200


def test_half_a_body_is_let_go_in_time() -> None:
    with live(FakeLLM, body_timeout_s=0.5) as server, ExitStack() as stack:
        made = [stack.enter_context(connected(server)) for _ in range(8)]
        for one in made:
            one.sendall(HEAD + b"Content-Length: 9000000\r\n\r\n" + b" " * 1_000_000)
        until(lambda: bodies_of(server).held >= 8_000_000)
        for one in made:
            found = rest(one)
            assert found.startswith(b"HTTP/1.1 408")
            assert b"body_timeout" in found
        assert bodies_of(server).held == 0


def test_bytes_under_way_are_bounded_and_counted_until_the_answer() -> None:
    with live(FakeLLM, body_timeout_s=0.5, max_body_bytes=10_000, max_bytes_under_way=15_000) as server:
        with connected(server, HEAD + b"Content-Length: 10000\r\n\r\n" + b" " * 9_000), server.client() as client:
            until(lambda: bodies_of(server).held == 9_000)
            long = BODY + b" " * 8_000
            refused = client.post("/v1/completions", content=long, headers={"Content-Type": "application/json"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_bytes")
            assert refused.headers["Retry-After"] == "1"
            assert client.post("/v1/completions", json={"prompt": "w5"}).status_code == 200
            until(lambda: bodies_of(server).held == 0)
            found = client.post("/v1/completions", content=long, headers={"Content-Type": "application/json"})
            assert found.status_code == 200
        server.llm.open.clear()
        with server.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"prompt": "w5"}, timeout=0.3)
        until(lambda: bodies_of(server).held == 0)


def test_a_client_that_leaves_in_its_body_leaves_nothing() -> None:
    with live(FakeLLM) as server:
        with connected(server, HEAD + b"Content-Length: 900000\r\n\r\n" + b" " * 100_000):
            until(lambda: bodies_of(server).held == 100_000)
        until(lambda: bodies_of(server).held == 0)


def test_a_body_in_chunks_is_refused_at_once() -> None:
    with live(FakeLLM) as server, connected(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n") as made:
        made.sendall(b"1\r\n \r\n" * 1_000)
        found = rest(made)
        assert found.startswith(b"HTTP/1.1 411")
        assert b"length_required" in found


def test_where_there_are_too_many_connections_those_go_that_keep_waiting() -> None:
    with live(FakeLLM, max_connections=8) as server, ExitStack() as stack:
        server.llm.open.clear()
        found: list[httpx.Response] = []
        client = stack.enter_context(server.client())
        asked = threading.Thread(
            target=lambda: found.append(client.post("/v1/completions", json={"prompt": "w5", "max_tokens": 2}))
        )
        asked.start()
        until(lambda: bool(server.llm.running))
        first = stack.enter_context(connected(server, HEAD))
        for number in range(30):
            sent = HEAD + (b"Content-Length: 100\r\n\r\n " if number % 2 else b"")
            stack.enter_context(connected(server, sent))
            until(lambda: len(server.server.server_state.connections) <= 8)
        assert rest(first) == b""
        with server.client() as other:
            assert other.get("/health").status_code == 200
        server.soon(server.llm.open.set)
        asked.join(10)
        assert found[0].status_code == 200  # who is being answered is not closed


def test_an_answer_that_nobody_reads_is_given_up() -> None:
    with live(FakeLLM, write_timeout_s=0.3) as server:
        with connected(server) as made:
            made.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 3_000)
            connections: Any = server.server.server_state.connections
            until(lambda: any(one.blocked_since for one in list(connections)), 20)
            until(lambda: not connections, 20)
        with server.client() as client:
            assert client.get("/health").status_code == 200
