"""What a chat's answer tells of messages that its cache has forgotten."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import millpond as mp
from millpond.server.app import create_app
from millpond.server.errors import ApiError
from millpond.server.message_spans import EnclosedMessages
from millpond.server.messages import Message
from millpond.server.settings import ServerSettings

RULES = "anna kettle and some river and old rain "
STORY = "the quiet rain past the meadow and old stone on the river " * 12
CHAT = [
    {"role": "system", "content": RULES},
    {"role": "user", "content": [{"type": "text", "text": STORY}, {"type": "text", "text": STORY}]},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "<ask> anna <is>"},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[mp.AsyncLLM]:
    made = mp.AsyncLLM("pond-recall", method="window", budget="20%", dtype="f32")
    yield made
    asyncio.run(made.close())


def ask(llm: mp.AsyncLLM, path: str, body: dict[str, Any]) -> httpx.Response:
    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(llm, ServerSettings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            return await client.post(path, json=body)

    return asyncio.run(work())


def chat(llm: mp.AsyncLLM, **cache: Any) -> dict[str, Any]:
    found = ask(llm, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "temperature": 0, "millpond": cache})
    assert found.status_code == 200, found.text
    return dict(found.json())


def test_a_window_forgets_what_was_said_first(llm: mp.AsyncLLM) -> None:
    answer = chat(llm, forgotten=True)
    told = answer["usage"]["millpond"]["forgotten"]
    assert [of["message"] for of in told] == [0, 1, 2, 3]
    assert told[0]["share"] == told[0]["fewer_than_half"] == 1.0
    assert 0.7 < told[1]["share"] < 0.95
    assert (told[2]["tokens"], told[2]["share"]) == (0, 0.0)
    assert told[3]["share"] == 0.0
    own = [len(llm.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (RULES.strip(), STORY * 2)]
    assert abs(told[0]["tokens"] - own[0]) <= 1
    assert abs(told[1]["tokens"] - own[1]) <= 2
    assert answer["choices"][0]["millpond"]["forgotten"] == told


def test_the_answer_is_the_one_without(llm: mp.AsyncLLM) -> None:
    plain, told = chat(llm), chat(llm, forgotten=True)
    assert "forgotten" not in plain["usage"]["millpond"]
    assert plain["choices"][0]["message"] == told["choices"][0]["message"]
    assert plain["usage"]["prompt_tokens"] == told["usage"]["prompt_tokens"]


def test_the_full_cache_forgets_nothing(llm: mp.AsyncLLM) -> None:
    told = chat(llm, forgotten=True, method="full")["usage"]["millpond"]["forgotten"]
    assert {(of["share"], of["fewer_than_half"]) for of in told} == {(0.0, 0.0)}


@pytest.mark.parametrize(("path", "body"), [("completions", {"prompt": "abc"}), ("responses", {"input": "abc"})])
def test_it_goes_with_chats_alone(llm: mp.AsyncLLM, path: str, body: dict[str, Any]) -> None:
    found = ask(llm, f"/v1/{path}", {**body, "millpond": {"forgotten": True}})
    assert found.status_code == 400
    assert "goes with a chat" in found.json()["error"]["message"]


def test_spans_behind_a_template() -> None:
    said = [Message(role="user", content="  hi there "), Message(role="assistant", content="hi there")]
    enclosed = EnclosedMessages(said)
    first, second = (str(message.content) for message in enclosed.messages)
    text = "<u>hi there<a>hi there</a>"
    assert enclosed.spans(f"<u>{first.strip()}<a>{second}</a>", text) == [(3, 11), (14, 22)]
    for marked in (f"<u>{first}<a></a>", f"<a>{second}<u>{first}", f"<u>{first}<a>{second}{second}</a>"):
        with pytest.raises(ApiError, match="template leaves a message out or changes it"):
            enclosed.spans(marked, text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": CHAT}),
        ("completions", {"prompt": RULES + STORY}),
        ("responses", {"input": STORY}),
    ],
)
def test_a_request_that_must_forget_nothing_is_refused_with_numbers(
    llm: mp.AsyncLLM, path: str, body: dict[str, Any]
) -> None:
    found = ask(llm, f"/v1/{path}", {**body, "millpond": {"on_pressure": "refuse"}})
    assert found.status_code == 422, found.text
    assert found.json()["error"]["code"] == "would_forget"
    assert re.search(r"\((79\.[5-9]|80\.[0-5])%\) would be evicted", found.json()["error"]["message"])
    assert ask(llm, f"/v1/{path}", {**body, "millpond": {"on_pressure": "evict"}}).status_code == 200
    assert ask(llm, f"/v1/{path}", {**body, "millpond": {"on_pressure": "swap"}}).status_code == 400


def test_one_that_fits_its_budget_forgets_nothing(llm: mp.AsyncLLM) -> None:
    answer = chat(llm, forgotten=True, on_pressure="refuse", budget="20%, at least 512")
    assert {(of["share"], of["fewer_than_half"]) for of in answer["usage"]["millpond"]["forgotten"]} == {(0.0, 0.0)}
