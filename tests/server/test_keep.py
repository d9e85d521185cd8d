"""Messages, parts and spans of a prompt that clients want kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import millpond as mp
from millpond.server.message_spans import EnclosedMessages, joined, kept_pieces
from millpond.server.messages import Message
from tests.server.test_forgotten import RULES, STORY, ask

KEEP = {"millpond": {"keep": True}}
ASK = {"role": "user", "content": "<ask> anna <is>"}


@pytest.fixture(scope="module")
def llm() -> Iterator[mp.AsyncLLM]:
    made = mp.AsyncLLM("pond-recall", method="window", budget="20%", dtype="f32")
    yield made
    asyncio.run(made.close())


def lost(llm: mp.AsyncLLM, messages: list[dict[str, Any]]) -> list[float]:
    """Of each message the share that fewer than half of the heads hold at the end."""
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "millpond": {"forgotten": True}}
    found = ask(llm, "/v1/chat/completions", body)
    assert found.status_code == 200, found.text
    return [of["fewer_than_half"] for of in found.json()["usage"]["millpond"]["forgotten"]]


def test_a_kept_message_is_whole_at_the_end(llm: mp.AsyncLLM) -> None:
    story = {"role": "user", "content": STORY}
    assert lost(llm, [{"role": "system", "content": RULES}, story, ASK])[0] == 1
    assert lost(llm, [{"role": "system", "content": RULES} | KEEP, story, ASK])[0] == 0


def test_a_kept_part_is_whole_and_the_rest_is_not(llm: mp.AsyncLLM) -> None:
    parts = [{"type": "text", "text": STORY}, {"type": "text", "text": RULES} | KEEP, {"type": "text", "text": STORY}]
    whole = lost(llm, [{"role": "user", "content": "".join(part["text"] for part in parts)}, ASK])
    kept = lost(llm, [{"role": "user", "content": parts}, ASK])
    own = len(RULES.split()) / len((STORY + RULES + STORY).split())
    assert 0 < kept[0] < whole[0]
    # the budget is the same, so the tail loses as many tokens as the part has: all held positions move
    assert whole[0] - kept[0] <= own + 0.01


def test_the_answer_knows_a_kept_fact(llm: mp.AsyncLLM) -> None:
    body = {"prompt": f"{RULES}{STORY}<ask> anna <is>", "max_tokens": 1, "temperature": 0}
    kept = body | {"millpond": {"keep": [[0, len(RULES)]]}}
    plain, told = (ask(llm, "/v1/completions", one).json()["choices"][0]["text"].strip() for one in (body, kept))
    assert told == "kettle"
    assert plain != "kettle"


def test_ids_are_kept_by_tokens(llm: mp.AsyncLLM) -> None:
    ids = llm.tokenizer(f"{RULES}{STORY}<ask> anna <is>")["input_ids"]
    n = len(llm.tokenizer(RULES)["input_ids"])
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "millpond": {"keep": [[0, n]]}}
    assert ask(llm, "/v1/completions", body).json()["choices"][0]["text"].strip() == "kettle"


@pytest.mark.parametrize(
    ("path", "body", "match"),
    [
        ("completions", {"prompt": "anna kettle", "millpond": {"keep": [[0, 50]]}}, "11 characters"),
        ("completions", {"prompt": "anna kettle", "millpond": {"keep": [[3, 2]]}}, "11 characters"),
        ("completions", {"prompt": ["anna", "kettle"], "millpond": {"keep": [[0, 2]]}}, "one prompt"),
        ("completions", {"prompt": [5, 6], "millpond": {"keep": [[0, 3]]}}, "must lie in the prompt"),
        ("completions", {"prompt": "anna", "millpond": {"keep": [[0, 1]] * 65}}, "64"),
        ("completions", {"prompt": f"{STORY}", "millpond": {"keep": [[0, 600]]}}, "more than the budget"),
        ("chat/completions", {"messages": [ASK], "millpond": {"keep": [[0, 2]]}}, "mark messages"),
        ("chat/completions", {"messages": [ASK | {"millpond": {"keep": 1}}]}, "keep"),
        ("chat/completions", {"messages": [ASK | {"millpond": {"hold": True}}]}, "hold"),
        ("responses", {"input": "abc", "millpond": {"keep": [[0, 2]]}}, "goes with the one prompt"),
    ],
)
def test_what_cannot_be_kept_is_refused(llm: mp.AsyncLLM, path: str, body: dict[str, Any], match: str) -> None:
    found = ask(llm, f"/v1/{path}", body)
    assert found.status_code == 400, found.text
    assert match in found.json()["error"]["message"]


def test_pieces_of_messages() -> None:
    part = {"type": "text", "text": "ab "}
    message = Message.model_validate({"role": "user", "content": [part, {**part, **KEEP}, part, {**part, **KEEP}]})
    assert kept_pieces(message) == [(3, 6), (9, 12)]
    assert kept_pieces(Message.model_validate({"role": "user", "content": "hi", **KEEP})) == [(0, 2)]
    assert kept_pieces(Message(role="user", content="hi")) == []
    enclosed = EnclosedMessages([message], [kept_pieces(message)])
    text = "<u>ab ab ab ab</u>"
    assert enclosed.spans(f"<u>{str(enclosed.messages[0].content).strip()}</u>", text) == [(6, 8), (12, 14)]
    assert joined([(4, 6), (0, 0), (1, 5), (6, 7), (9, 10)]) == ((1, 7), (9, 10))
