"""Chunks in requests: spans of completions and marked parts of chats, against an engine with a store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import millpond as mp
from millpond.server.app import create_app
from millpond.server.errors import ApiError
from millpond.server.message_spans import MarkedChunks
from millpond.server.messages import Message
from millpond.server.prompt_marks import with_chunks
from millpond.server.settings import ServerSettings

A = "the quiet rain past the meadow and old stone on the river "
B = "anna kettle and some river and old rain "
QUESTION = "<ask> anna <is>"


@pytest.fixture(scope="module")
def llm() -> Iterator[mp.AsyncLLM]:
    with_store = mp.AsyncLLM("pond-recall", method="full", dtype="f32", chunk_store=mp.ChunkStore(None))
    yield with_store
    asyncio.run(with_store.close())


def ask(llm: mp.AsyncLLM, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(llm, ServerSettings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    return asyncio.run(work())


def spans(*texts: str) -> list[list[int]]:
    """Where these texts lie, one after the other."""
    found, begin = [], 0
    for text in texts:
        found.append([begin, begin + len(text)])
        begin += len(text)
    return found


def complete(llm: mp.AsyncLLM, prompt: Any, chunks: Any, recompute: Any = 0) -> httpx.Response:
    asked = {
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0,
        "millpond": {"chunks": chunks, "recompute": recompute},
    }
    return ask(llm, "/v1/completions", asked)


def test_spans_of_a_completion_are_chunks(llm: mp.AsyncLLM) -> None:
    first = complete(llm, A + B + QUESTION, spans(A, B)).json()
    assert first["usage"]["millpond"]["reused_tokens"] == 0
    again = complete(llm, B + A + QUESTION, spans(B, A)).json()
    usage = again["usage"]
    n = sum(len(llm.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (A, B))
    assert usage["millpond"]["reused_tokens"] == n
    assert usage["millpond"]["exact"] is False
    assert usage["prompt_tokens_details"] == {"cached_tokens": n}
    exact = complete(llm, B + A + QUESTION, spans(B, A), 1).json()
    assert exact["usage"]["millpond"]["exact"] is True
    assert exact["usage"]["millpond"]["reused_tokens"] == 0
    metrics = ask(llm, "/metrics").text
    assert f"millpond_chunk_reused_tokens_total {float(n)}" in metrics
    assert "millpond_chunk_stored_total 2.0" in metrics
    assert "millpond_chunk_memory_bytes" in metrics


def test_spans_of_token_ids(llm: mp.AsyncLLM) -> None:
    ids = llm.tokenizer(A + QUESTION)["input_ids"]
    complete(llm, ids, [[1, 6]])
    assert complete(llm, ids, [[1, 6]]).json()["usage"]["millpond"]["reused_tokens"] == 5


def test_marked_parts_of_a_chat_are_chunks(llm: mp.AsyncLLM) -> None:
    def chat(*parts: tuple[str, bool]) -> dict[str, Any]:
        content = [{"type": "text", "text": text, "chunk": chunk} for text, chunk in parts]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "millpond": {"recompute": 0}}
        return dict(ask(llm, "/v1/chat/completions", body).json()["usage"])

    plain = chat((A, False), (B, False), (QUESTION, False))
    assert plain["millpond"]["reused_tokens"] == 0
    chat((A, True), (B, True), (QUESTION, False))
    again = chat((B, True), (A, True), (QUESTION, False))
    assert again["millpond"]["reused_tokens"] > 10
    assert abs(again["prompt_tokens"] - plain["prompt_tokens"]) <= 4, "tokens at the seams alone may differ"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "abc", "millpond": {"chunks": [[0, 4]]}}, "must lie in the prompt of 3 characters"),
        ({"prompt": "abc", "millpond": {"chunks": [[1, 1]]}}, "must lie in the prompt of 3 characters"),
        ({"prompt": [5, 6, 7], "millpond": {"chunks": [[2, 9]]}}, "must lie in the prompt of 3 tokens"),
        ({"prompt": "abcdef", "millpond": {"chunks": [[0, 3], [2, 4]]}}, "overlaps the one before it"),
        ({"prompt": ["ab", "cd"], "millpond": {"chunks": [[0, 1]]}}, "goes with one prompt"),
        ({"prompt": "abc", "echo": True, "millpond": {"chunks": [[0, 2]]}}, "goes with one prompt"),
        ({"prompt": "abc", "millpond": {"recompute": 1.5}}, "recompute"),
        ({"prompt": "abc", "millpond": {"chunks": [[0, 2]], "method": "h2o", "budget": 8}}, "needs every query"),
    ],
)
def test_bad_spans_are_refused(llm: mp.AsyncLLM, body: dict[str, Any], words: str) -> None:
    found = ask(llm, "/v1/completions", body)
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]


def test_spans_go_with_completions_alone(llm: mp.AsyncLLM) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "millpond": {"chunks": [[0, 1]]}}
    assert "in a chat mark text parts" in ask(llm, "/v1/chat/completions", body).json()["error"]["message"]
    found = ask(llm, "/v1/responses", {"input": "hi", "millpond": {"chunks": [[0, 1]]}})
    assert "in a chat mark text parts" in found.json()["error"]["message"]


def test_a_span_cuts_no_character() -> None:
    text = "a\U0001f600b\u00e9"
    assert with_chunks(text, [(1, 2)]).texts == ("a", "\U0001f600", "b\u00e9")


def test_a_template_that_loses_chunks_is_an_error() -> None:
    said = [
        Message.model_validate(
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x"},
                    {"type": "text", "text": "one", "chunk": True},
                    {"type": "text", "text": "two", "chunk": True},
                ],
            }
        )
    ]
    marked = MarkedChunks(said)
    _, one, two = (part.text for part in marked.messages[0].content)  # type: ignore[union-attr]
    assert marked.split(f"<x{one}{two}>") == ["<x", mp.Chunk("one"), mp.Chunk("two"), ">"]
    for text in (f"x{one}", f"{two}{one}", f"{one}{one}{two}", f"{one}{two}{two}", ""):
        with pytest.raises(ApiError, match="leaves a chunk out"):
            marked.split(text)
