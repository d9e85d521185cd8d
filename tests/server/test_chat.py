"""Chats: templates with and without tools, pieces, formats."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from server.test_completions import ask, events
from tests.helpers.evals.small import tiny_tokenizer
from tests.helpers.server.fake import FakeLLM

TEMPLATE = (
    "{% if tools %}w90{% for tool in tools %} {{ tool['function']['name'] }}{% endfor %} {% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %} {{ call['function']['arguments']['a'] }}{% endfor %} {% endfor %}"
    "{% if extra is defined %}{{ extra }} {% endif %}{% if add_generation_prompt %}w50{% endif %}"
)


def templated() -> FakeLLM:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    return FakeLLM(tokenizer=tokenizer)


def chat(body: dict[str, Any], llm: FakeLLM | None = None, **settings: Any) -> Any:
    messages = {"messages": [{"role": "user", "content": "w5 w6"}]}
    return ask(messages | body, llm or templated(), "/v1/chat/completions", **settings)


def called(arguments: Any, name: str = "w33") -> dict[str, Any]:
    """A call as clients send it back."""
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def read(body: dict[str, Any]) -> str:
    """What the engine was given, as text."""
    llm = templated()
    assert chat(body, llm).status_code == 200
    return str(llm.tokenizer.decode(llm.asked[0].prompt))


def test_an_answer_has_the_message() -> None:
    found = chat({"max_tokens": 2}).json()
    assert found["object"] == "chat.completion"
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": " w51 w52", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens"] == 3


def test_without_a_limit_the_server_leaves_it_to_the_context() -> None:
    llm = templated()
    chat({}, llm)
    chat({"max_completion_tokens": 5}, llm)
    chat({}, llm, max_tokens=6)
    assert [request.params.max_tokens for request in llm.asked] == [None, 5, 6]


def test_a_stream_put_together_is_the_whole_answer() -> None:
    body = {"max_tokens": 4, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole = chat(body).json()
    pieces = events(chat(body | {"stream": True}).text)
    assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        own = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {}
        assert "".join(piece["delta"].get("content", "") for piece in own) == choice["message"]["content"]
        assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + ["length"]
        told = [item for piece in own if piece["logprobs"] for item in piece["logprobs"]["content"]]
        assert told == choice["logprobs"]["content"]
        assert len(told[0]["top_logprobs"]) == 2


def test_tools_and_calls_pass_through_the_template() -> None:
    tool = {"type": "function", "function": {"name": "w33", "parameters": {"type": "object"}}}
    assert read({"tools": [tool]}) == "w90 w33 w5 w6 w50"
    assert read({"tools": [tool], "tool_choice": "none"}) == "w5 w6 w50"
    call = called('{"a": "w44"}')
    said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "w9"}]
    assert read({"messages": said}) == "w44 w9 w50"


def test_parts_and_template_arguments() -> None:
    parts = [{"type": "text", "text": "w5 "}, {"type": "text", "text": "w7"}]
    assert read({"messages": [{"role": "user", "content": parts}]}) == "w5 w7 w50"
    assert read({"chat_template_kwargs": {"extra": "w8"}}) == "w5 w6 w8 w50"
    assert read({"add_generation_prompt": False}) == "w5 w6"


def test_a_tokenizer_without_a_template_gets_plain_names_and_a_stop() -> None:
    llm = FakeLLM()
    assert chat({"stop": ["w4"]}, llm).status_code == 200
    (request,) = llm.asked
    assert request.params.stop == ("w4", "\nUser:")
    assert len(request.prompt) == 5  # <bos> User: w5 w6 Assistant:
    refused = chat({"chat_template_kwargs": {"extra": 1}}, llm)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_chat_template")


def test_formats_become_schemas() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for wanted, expected in [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}, schema),
    ]:
        llm = templated()
        assert chat({"response_format": wanted}, llm).status_code == 200
        assert llm.asked[0].params.json_schema == expected


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        ({"messages": [{"role": "system", "content": "w5"}]}, "template_error", "no system here"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "king", "content": "w5"}]}, "invalid_value", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_value", "type"),
        ({"messages": [{"role": "assistant", "tool_calls": [called("{")]}]}, "invalid_value", "JSON"),
        ({"chat_template_kwargs": {"tokenize": True}}, "invalid_value", "set by the server"),
        ({"top_logprobs": 2}, "invalid_value", "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "invalid_value", "give one"),
        ({"max_tokens": 0}, "invalid_value", "at least 1"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"functions": []}, "unknown_parameter", "use tools"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format"),
    ],
)
def test_what_cannot_be_is_refused(body: dict[str, Any], code: str, word: str) -> None:
    found = chat(body)
    assert found.status_code == 400
    assert found.json()["error"]["code"] == code
    assert word in found.json()["error"]["message"]
