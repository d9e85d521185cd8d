"""What a server sends may come back in the next request, and what changes no answer may be said."""

from __future__ import annotations

from typing import Any

import pytest

from server.test_chat import called, chat, read, templated
from server.test_completions import ask, events

USER = {"role": "user", "content": "w5"}
CALL = called('{"a": "w44"}')
#: What OpenAI's client makes of an answer beside its text, as it sends it back.
EMPTY = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}


def test_an_answer_may_be_sent_back() -> None:
    llm = templated()
    for _ in range(2):
        said: list[Any] = [USER]
        for _ in range(3):
            answer = chat({"messages": said, "max_tokens": 2}, llm)
            assert answer.status_code == 200, answer.text
            said += [answer.json()["choices"][0]["message"], USER]


def test_a_stream_put_together_may_be_sent_back() -> None:
    llm, made = templated(), dict[str, Any]()
    for piece in events(chat({"max_tokens": 3, "stream": True}, llm).text):
        for name, value in piece["choices"][0]["delta"].items():
            made[name] = made.get(name, "") + value if name == "content" else value
    assert chat({"messages": [USER, made, USER]}, llm).status_code == 200


@pytest.mark.parametrize("empty", [EMPTY, EMPTY | {"annotations": None, "tool_calls": []}])
def test_what_stands_empty_in_a_message_changes_no_prompt(empty: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": "w6"}
    assert read({"messages": [USER, answer | empty, USER]}) == read({"messages": [USER, answer, USER]})


def test_what_clients_make_of_an_answer_may_come_along() -> None:
    """OpenAI's what it parsed, LiteLLM's what it found beside OpenAI's fields."""
    function = CALL["function"] | {"parsed_arguments": {"a": "w44"}}
    message = {"role": "assistant", "tool_calls": [CALL | {"function": function}], "parsed": {"b": ["w7"]}}
    message["provider_specific_fields"] = {"refusal": None}
    plain = {"role": "assistant", "tool_calls": [CALL]}
    assert read({"messages": [USER, message]}) == read({"messages": [USER, plain]})


def test_calls_may_have_the_index_of_a_stream_and_arguments_as_values() -> None:
    expected = read({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]})
    assert "w44" in expected
    for call in (CALL | {"index": 0}, called({"a": "w44"})):
        assert read({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}) == expected


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_changes_no_answer_may_be_said(path: str) -> None:
    words: dict[str, Any] = {
        "store": False,
        "service_tier": "auto",
        "metadata": {"run": "5"},
        "user": "me",
        "prompt_cache_key": "k",
        "safety_identifier": "x",
        "stream": True,
        "stream_options": {"include_obfuscation": False},
    }
    own: dict[str, Any] = {"messages": [USER]} if "chat" in path else {"prompt": "w5"}
    llm = templated()
    for body in (own, own | words, own | dict.fromkeys(words)):
        assert ask(body, llm, path).status_code == 200
    assert llm.asked[0].params == llm.asked[1].params == llm.asked[2].params


def test_null_stands_for_a_default_that_cannot_be_changed() -> None:
    fields = [
        "audio",
        "function_call",
        "functions",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "reasoning_effort",
        "response_format",
        "tool_choice",
        "tools",
        "verbosity",
        "web_search_options",
    ]
    assert read(dict.fromkeys(fields) | {"modalities": ["text"]}) == read({})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"audio": {"response_format": "x"}}, "audio is not supported: answers are text"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "low"}, "reasoning_effort is not supported"),
        ({"verbosity": "low"}, "verbosity is not supported"),
        ({"messages": [USER, {"role": "assistant", "refusal": "no"}]}, "messages.1.refusal is not supported"),
        ({"messages": [USER, {"role": "assistant", "audio": {"id": "x"}}]}, "messages.1.audio is not supported"),
        ({"messages": [USER, {"role": "assistant", "annotations": [{}]}]}, "messages.1.annotations"),
        ({"messages": [{"role": "assistant", "tool_calls": [called("[1]")]}]}, "object"),
        ({"messages": [{"role": "assistant", "tool_calls": [called('{"a": NaN}')]}]}, "NaN"),
        ({"messages": [{"role": "assistant", "tool_calls": [called("[" * 9_000)]}]}, "JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "tool_calls"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f" * 300}}]}, "name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "x" * 200_000}}}]}, "131,072"),
        ({"messages": [{"role": "assistant", "content": "", "parsed": "x" * 200_000}]}, "131,072"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"user": "x" * 600}, "user"),
        ({"prompt_cache_key": "x" * 600}, "prompt_cache_key"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_could_change_an_answer_is_refused_by_name_and_all_is_bounded(body: dict[str, Any], words: str) -> None:
    llm = templated()
    refused = chat(body, llm)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]
    assert not llm.asked
