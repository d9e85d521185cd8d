"""Parts of a chat that later tokens do not see: thoughts, answers of tools, messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import millpond as mp
from millpond.server.errors import ApiError
from millpond.server.message_spans import EnclosedMessages
from millpond.server.messages import Message
from millpond.server.prompt_marks import forgotten_pieces, thoughts_in
from tests.server.test_forgotten import ask

STORY = "the quiet rain past the meadow and old stone on the river "
CALL = {"id": "call_3", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "anna kettle " + STORY},
    {"role": "assistant", "content": "<think>" + STORY * 2 + "</think>old rain"},
    {"role": "assistant", "content": "rain", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_3", "content": STORY * 3},
    {"role": "user", "content": "<ask> anna <is>"},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[mp.AsyncLLM]:
    made = mp.AsyncLLM("pond-recall", method="full", dtype="f32")
    yield made
    asyncio.run(made.close())


def chat(llm: mp.AsyncLLM, *names: str, **cache: Any) -> dict[str, Any]:
    body = {"messages": CHAT, "max_tokens": 4, "temperature": 0, "millpond": {"forget": list(names), **cache}}
    found = ask(llm, "/v1/chat/completions", body)
    assert found.status_code == 200, found.text
    return dict(found.json()["usage"]["millpond"])


def tokens(llm: mp.AsyncLLM, text: str) -> int:
    return len(llm.tokenizer(text.strip(), add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("names", "gone", "message"),
    [
        (["thoughts"], STORY * 2, 1),
        (["tool:call_3"], STORY * 3, 3),
        (["message:3"], STORY * 3, 3),
        (["message:0"], "anna kettle " + STORY, 0),
    ],
)
def test_named_parts_leave(llm: mp.AsyncLLM, names: list[str], gone: str, message: int) -> None:
    usage = chat(llm, *names, forgotten=True)
    assert abs(usage["forgotten_tokens"] - tokens(llm, gone)) <= 2
    assert usage["exact"] is False
    shares = [of["share"] for of in usage["forgotten"]]
    assert shares[message] == (1.0 if message != 1 else pytest.approx(0.8, abs=0.15))
    assert not any(share for number, share in enumerate(shares) if number != message)


def test_together_they_leave_once(llm: mp.AsyncLLM) -> None:
    one = [chat(llm, name)["forgotten_tokens"] for name in ("thoughts", "tool:call_3")]
    assert chat(llm, "thoughts", "tool:call_3", "message:3")["forgotten_tokens"] == sum(one)
    assert chat(llm)["forgotten_tokens"] == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tool:call_9", "'tool:call_9' is not in this chat; there are: thoughts, tool:call_3, message:0 to message:4"),
        ("message:5", "message:0 to message:4"),
        ("message:-1", "is not in this chat"),
        ("rules", "is not in this chat"),
        ("tool:", "is not in this chat"),
    ],
)
def test_unknown_names_say_what_there_is(llm: mp.AsyncLLM, name: str, said: str) -> None:
    body = {"messages": CHAT, "millpond": {"forget": [name]}}
    found = ask(llm, "/v1/chat/completions", body)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert said in error["message"]
    assert error["param"] == "millpond.forget"


def test_it_goes_with_a_chat_alone(llm: mp.AsyncLLM) -> None:
    for path, body in (("/v1/completions", {"prompt": "anna"}), ("/v1/responses", {"input": "anna"})):
        found = ask(llm, path, {**body, "millpond": {"forget": ["thoughts"]}})
        assert found.status_code == 400, found.text
        assert "/v1/chat/completions" in found.json()["error"]["message"]


def test_thoughts_are_found_between_their_tags() -> None:
    assert thoughts_in("no tags") == []
    text = "<think>a</think>b<think>c</think>"
    assert [text[slice(*span)] for span in thoughts_in(text)] == ["a", "c"]
    assert thoughts_in("so <think>on") == [(10, 12)]


def test_reasoning_that_a_template_leaves_out_is_no_error() -> None:
    said = [Message(role="assistant", content="rain", reasoning_content="so it is")]
    (pieces,) = forgotten_pieces(["thoughts"], said)
    enclosed = EnclosedMessages(said, pieces)
    assert enclosed.spans("rain", "rain") == [(0, 0)]
    (message,) = enclosed.messages
    marked = f"<think>{message.reasoning_content}</think>{message.content}"
    text = "<think>so it is</think>rain"
    assert [text[slice(*span)] for span in enclosed.spans(marked, text)] == ["so it is"]


def test_a_message_without_a_text_is_refused() -> None:
    with pytest.raises(ApiError, match="without a text"):
        forgotten_pieces(["message:0"], [Message(role="assistant", content="")])
