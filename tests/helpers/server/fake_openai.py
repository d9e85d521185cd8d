"""A server that speaks just enough of OpenAI's interface over plain sockets, as well or as badly as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FakeServer:
    """Answers with `max_tokens` words, `step_s` apart; `conduct` maps the number of a request to how it goes wrong.

    The first answers wait until `together` requests have been under way at a time, at most 10 s each.

    Attributes:
        bodies: what was asked, in order. most_at_once: requests under way at a time, at most.
    """

    def __init__(
        self, step_s: float = 0.0, conduct: dict[int, str] | None = None, usage: bool = True, together: int = 1
    ) -> None:
        self.step_s, self.conduct, self.usage, self.together = step_s, conduct or {}, usage, together
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.most_at_once = self._under_way = 0
        self.scrapes = 0
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        if head.startswith("GET /v1/models "):
            self._whole(writer, 200, json.dumps({"data": [{"id": "fake-1"}]}))
        elif head.startswith("GET /metrics "):
            self.scrapes += 1
            used = {1: 100, 2: 900}.get(self.scrapes, 50)
            self._whole(writer, 200, f"millpond_kv_used_bytes {used}\nmillpond_prefix_hit_tokens_total {self.scrapes}")
        else:
            self.headers.append(head)
            await self._complete(json.loads(body), "/chat/" in head, writer)
        await writer.drain()

    def _whole(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())

    async def _complete(self, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
        conduct = self.conduct.get(len(self.bodies), "well")
        self.bodies.append(body)
        if conduct == "busy":
            self._whole(writer, 429, '{"error": {"message": "too many"}}')
            return
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if conduct == "silent":
            await asyncio.sleep(5)
        for _ in range(1000):
            if self.most_at_once >= self.together:
                break
            await asyncio.sleep(0.01)
        n = body["max_tokens"]
        if chat:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for i in range(n):
            await asyncio.sleep(self.step_s)
            if i == n // 2 and conduct != "well":
                self._under_way -= 1
                self._go_wrong(conduct, writer)
                return
            said = {"delta": {"content": f"w{i} "}} if chat else {"text": f"w{i} "}
            self._event(writer, {"choices": [{**said, "finish_reason": "length" if i == n - 1 else None}]})
            await writer.drain()
        self._under_way -= 1
        if self.usage:
            self._event(writer, {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": n}})
        self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    def _go_wrong(self, conduct: str, writer: asyncio.StreamWriter) -> None:
        if conduct == "error":
            self._event(writer, {"error": {"message": "out of memory"}})
        elif conduct == "garbage":
            self._event(writer, "{nonsense")
        if conduct == "hang up":
            writer.close()
        else:
            writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, data: Any) -> None:
        text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")

    @contextmanager
    def running(self) -> Iterator[FakeServer]:
        """On a port of its own, in a thread of its own."""
        loop, ready = asyncio.new_event_loop(), threading.Event()

        async def begin() -> asyncio.Server:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ready.set()
            return server

        server = loop.run_until_complete(begin())
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
