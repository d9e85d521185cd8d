"""Messages of a chat, and spans of a prompt, that keep a share of the budget."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import millpond as mp
from millpond.prompt_marks import disjoint
from millpond.server.errors import ApiError
from millpond.server.messages import Message
from millpond.server.prompt_marks import chat_marks
from millpond.server.routes.completions import call_of
from millpond.server.schemas import CacheFields, CompletionBody
from millpond.server.service import Service
from millpond.server.settings import ServerSettings
from tests.server.test_forgotten import CHAT, RULES, STORY, ask

PART = {"type": "text", "text": "anna", "chunk": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[mp.AsyncLLM]:
    made = mp.AsyncLLM("pond-recall", method="window", budget="10%", dtype="f32")
    yield made
    asyncio.run(made.close())


def lost(llm: mp.AsyncLLM, **fields: Any) -> list[float]:
    """Of each message the share that no head holds at the end."""
    body = {
        "messages": [{"role": "system", "content": RULES * 3}, *CHAT[1:]],
        "max_tokens": 4,
        "temperature": 0,
        "millpond": {"forgotten": True, **fields},
    }
    found = ask(llm, "/v1/chat/completions", body)
    assert found.status_code == 200, found.text
    return [of["share"] for of in found.json()["usage"]["millpond"]["forgotten"]]


def test_no_message_is_lost_whole(llm: mp.AsyncLLM) -> None:
    assert lost(llm)[0] == 1
    fair = lost(llm, fair_shares=1)
    assert fair[0] <= 0.95
    assert fair[1] < 1
    few = {"method": "tova"}
    assert lost(llm, **few, fair_shares=1)[0] < lost(llm, **few)[0]


@pytest.mark.parametrize("in_ids", [False, True])
def test_a_prompt_has_shares_of_characters_or_tokens(llm: mp.AsyncLLM, in_ids: bool) -> None:
    prompt = f"{RULES}{STORY}<ask> anna <is>"
    ids = llm.tokenizer(prompt)["input_ids"]
    n = len(llm.tokenizer(RULES)["input_ids"])
    fair = [[1, n, 0.5]] if in_ids else [[0, len(RULES.strip()), 0.5]]
    body = CompletionBody(prompt=ids if in_ids else prompt, millpond=CacheFields.model_validate({"fair_shares": fair}))
    (request,) = asyncio.run(call_of(Service(llm, ServerSettings()), body)).requests
    assert request.marks.shares == ((1, n, 0.5),)
    found = ask(llm, "/v1/completions", {"prompt": body.prompt, "max_tokens": 3, "millpond": {"fair_shares": fair}})
    assert found.status_code == 200, found.text


@pytest.mark.parametrize(
    ("path", "body", "match"),
    [
        ("completions", {"prompt": "anna kettle", "millpond": {"fair_shares": [[0, 50, 0.5]]}}, "11 characters"),
        ("completions", {"prompt": "anna kettle", "millpond": {"fair_shares": 0.5}}, "no messages"),
        ("completions", {"prompt": ["anna", "kettle"], "millpond": {"fair_shares": [[0, 2, 0.5]]}}, "one prompt"),
        ("completions", {"prompt": "anna kettle", "millpond": {"fair_shares": [[0, 5, 0.5], [4, 9, 1.0]]}}, "overlaps"),
        ("completions", {"prompt": [5, 6], "millpond": {"fair_shares": [[0, 3, 0.5]]}}, "must lie in the prompt"),
        ("completions", {"prompt": [5, 6], "millpond": {"fair_shares": [[0, 2, 2]]}}, "less than or equal to 1"),
        ("completions", {"prompt": "anna", "millpond": {"fair_shares": [[0, 1, 0.5]] * 257}}, "256"),
        ("chat/completions", {"messages": CHAT, "millpond": {"fair_shares": 0}}, "greater than 0"),
        ("chat/completions", {"messages": CHAT, "millpond": {"fair_shares": [[0, 2, 0.5]]}}, "one number"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [PART]}], "millpond": {"fair_shares": 1}},
            "chunks",
        ),
        ("chat/completions", {"messages": CHAT, "millpond": {"fair_shares": 1, "method": "streaming"}}, "absolute"),
        ("responses", {"input": "abc", "millpond": {"fair_shares": 0.5}}, "chat/completions"),
    ],
)
def test_what_has_no_share_is_refused(llm: mp.AsyncLLM, path: str, body: dict[str, Any], match: str) -> None:
    found = ask(llm, f"/v1/{path}", body)
    assert found.status_code in (400, 422), found.text
    assert match in found.json()["error"]["message"]


def test_a_token_of_two_messages_is_of_the_first() -> None:
    assert disjoint([(0, 0, 1), (0, 5, 0.5), (4, 7, 1.0), (5, 6, 1)]) == ((0, 5, 0.5), (5, 7, 1.0))
    many = [Message(role="user", content="a")] * 257
    with pytest.raises(ApiError, match="257 messages"):
        chat_marks(many, CacheFields(fair_shares=1), False)
    assert chat_marks(many[1:], CacheFields(fair_shares=1), False).share == 1
