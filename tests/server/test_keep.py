"""Messages, parts and spans of a prompt that clients want kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import millpond as mp
from millpond.prompt_marks import united
from millpond.server.message_spans import EnclosedMessages
from millpond.server.messages import Message
from millpond.server.prompt_marks import MessagePieces, kept_pieces
from millpond.server.routes.completions import call_of
from millpond.server.schemas import CacheFields, CompletionBody
from millpond.server.service import Service
from millpond.server.settings import ServerSettings
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
    parts = [{"type": "text", "text": STORY}, {"type": "text", "text": RULES} | KEEP]
    story = {"role": "user", "content": STORY * 2}
    own = len(RULES.split()) / len((STORY + RULES).split())
    assert lost(llm, [{"role": "system", "content": STORY + RULES}, story, ASK])[0] == 1
    assert lost(llm, [{"role": "system", "content": parts}, story, ASK])[0] == pytest.approx(1 - own, abs=0.02)


@pytest.mark.parametrize("in_ids", [False, True])
def test_a_prompt_keeps_characters_or_tokens(llm: mp.AsyncLLM, in_ids: bool) -> None:
    prompt = f"{RULES}{STORY}<ask> anna <is>"
    begin, end = prompt.index("kettle"), prompt.index("river") + 5
    ids = llm.tokenizer(prompt)["input_ids"]
    name, last = (llm.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ("kettle", "river"))
    among = ids.index(name), ids.index(last) + 1
    kept = {"keep": [among if in_ids else (begin, end)]}
    service = Service(llm, ServerSettings())
    body = CompletionBody(prompt=ids if in_ids else prompt, millpond=CacheFields.model_validate(kept))
    (request,) = asyncio.run(call_of(service, body)).requests
    assert request.marks.keep == (among,)
    found = ask(llm, "/v1/completions", {"prompt": body.prompt, "max_tokens": 3, "millpond": kept})
    assert found.status_code == 200, found.text


@pytest.mark.parametrize(
    ("path", "body", "match"),
    [
        ("completions", {"prompt": "anna kettle", "millpond": {"keep": [[0, 50]]}}, "11 characters"),
        ("completions", {"prompt": "anna kettle", "millpond": {"keep": [[3, 2]]}}, "11 characters"),
        ("completions", {"prompt": ["anna", "kettle"], "millpond": {"keep": [[0, 2]]}}, "one prompt"),
        ("completions", {"prompt": [5, 6], "millpond": {"keep": [[0, 3]]}}, "must lie in the prompt"),
        ("completions", {"prompt": "anna", "millpond": {"keep": [[0, 1]] * 65}}, "64"),
        (
            "completions",
            {"prompt": f"{STORY}", "millpond": {"keep": [[0, 600]]}},
            "124 kept tokens and 1 entries that the method protects are more than the budget",
        ),
        ("chat/completions", {"messages": [ASK], "millpond": {"keep": [[0, 2]]}}, "mark messages"),
        ("chat/completions", {"messages": [ASK | {"millpond": {"keep": 1}}]}, "keep"),
        ("chat/completions", {"messages": [ASK | {"millpond": {"hold": True}}]}, "hold"),
        ("responses", {"input": "abc", "millpond": {"keep": [[0, 2]]}}, "goes with the one prompt"),
    ],
)
def test_what_cannot_be_kept_is_refused(llm: mp.AsyncLLM, path: str, body: dict[str, Any], match: str) -> None:
    found = ask(llm, f"/v1/{path}", body)
    assert found.status_code == (422 if "budget" in match else 400), found.text
    assert match in found.json()["error"]["message"]


def test_pieces_of_messages() -> None:
    part = {"type": "text", "text": "ab "}
    message = Message.model_validate({"role": "user", "content": [part, {**part, **KEEP}, part, {**part, **KEEP}]})
    assert kept_pieces(message) == [(3, 6), (9, 12)]
    assert kept_pieces(Message.model_validate({"role": "user", "content": "hi", **KEEP})) == [(0, 2)]
    assert kept_pieces(Message(role="user", content="hi")) == []
    enclosed = EnclosedMessages([message], MessagePieces([kept_pieces(message)]))
    text = "<u>ab ab ab ab</u>"
    assert enclosed.spans(f"<u>{str(enclosed.messages[0].content).strip()}</u>", text) == [(6, 8), (12, 14)]
    assert united([(4, 6), (0, 0), (1, 5), (6, 7), (9, 10)]) == ((1, 7), (9, 10))
