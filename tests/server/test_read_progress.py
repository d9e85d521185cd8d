"""`return_progress`: how far a prompt is read, in the words of llama.cpp's server, before the first piece of text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.server.fake import FakeLLM
from tests.server.test_completions import ask, events

CHAT = {"messages": [{"role": "user", "content": "w5 w6 w7 w8 w9 w10 w11"}], "max_tokens": 3, "stream": True}
COMPLETION = {"prompt": "w5 w6 w7 w8 w9 w10 w11 w12", "max_tokens": 3, "stream": True}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


def stable(event: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from one request to the next."""
    return {name: value for name, value in event.items() if name not in ("id", "created")}


@pytest.mark.parametrize("path", ROUTES)
def test_progress_comes_first_and_the_rest_is_as_without(path: str) -> None:
    llm = FakeLLM()
    plain = events(ask(ROUTES[path], llm, path).text)
    told = events(ask(ROUTES[path] | {"return_progress": True}, llm, path).text)
    assert [one.tell_read for one in llm.asked] == [False, True]
    assert not any("prompt_progress" in event for event in plain), "a client that did not ask is not disturbed"
    progress = [event["prompt_progress"] for event in told if "prompt_progress" in event]
    total = len(llm.asked[-1].prompt)
    assert [one["processed"] for one in progress] == [*range(4, total, 4), total]
    assert {(one["total"], one["index"]) for one in progress} == {(total, 0)}
    assert [one["cache"] for one in progress] == [0] * (len(progress) - 1) + [3]
    assert all(one["time_ms"] >= 0 for one in progress)
    assert [event["choices"] for event in told[: len(progress)]] == [[]] * len(progress)
    assert list(map(stable, told[len(progress) :])) == list(map(stable, plain))


def test_each_prompt_of_a_completion_has_its_own() -> None:
    prompts = ["w5 w6 w7 w8 w9", "w5 w6"]
    found = events(ask(COMPLETION | {"prompt": prompts, "return_progress": True}).text)
    progress = [event["prompt_progress"] for event in found if "prompt_progress" in event]
    assert {one["index"]: one["processed"] for one in progress} == {0: 6, 1: 3}


def test_an_echo_is_sent_once_its_prompt_is_read() -> None:
    body = COMPLETION | {"echo": True, "logprobs": 1}
    plain, told = events(ask(body).text), events(ask(body | {"return_progress": True}).text)
    rest = [event for event in told if "prompt_progress" not in event]
    assert list(map(stable, rest)) == list(map(stable, plain))


@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_in_one_piece_has_no_place_for_it(path: str) -> None:
    found = ask(ROUTES[path] | {"return_progress": True, "stream": False}, path=path)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "return_progress"
    assert ask(ROUTES[path] | {"return_progress": False, "stream": False}, path=path).status_code == 200
