"""Tools over HTTP: calls leave the text, whole and streamed, and an answer that must be a call is held to be one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.test_chat import chat
from server.test_completions import events
from tests.helpers.server.scripted import ScriptedLLM

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = {"tools": [WEATHER, NOW]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TWO = f'Let me look.\n{CALL}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>'
BROKEN = '<tool_call>{"name": "now", "arguments": {"a": x}}</tool_call>'


def answer(text: str, body: dict[str, Any] = TOOLS, **more: Any) -> dict[str, Any]:
    found = chat(body, ScriptedLLM(text, **more))
    assert found.status_code == 200, found.text
    (choice,) = found.json()["choices"]
    return dict(choice)


def together(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream says, as clients put it together."""
    content: str | None = None
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        delta = piece["choices"][0]["delta"]
        if delta.get("content") is not None:
            content = (content or "") + delta["content"]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                assert call["id"]
                assert call["type"] == "function"
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return {"content": content, "calls": calls, "reason": pieces[-1]["choices"][0]["finish_reason"]}


def test_calls_leave_the_text() -> None:
    choice = answer(TWO)
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "Let me look.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Bern"}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert answer(CALL)["message"]["content"] is None


@pytest.mark.parametrize("text", ["Hello <b>", BROKEN, CALL.replace("get_weather", "launch"), CALL[:-20]])
def test_what_is_no_call_of_a_tool_is_content(text: str) -> None:
    choice = answer(text)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"


BARE = '```json\n{\n  "name": "get_weather",\n  "arguments": {"city": "Bern"}\n}\n```'


def test_a_call_without_marks_is_one_whole_and_streamed() -> None:
    """As Qwen2.5-Coder writes them."""
    for text in (BARE, BARE[8:-4], f"[{BARE[8:-4]}]"):
        choice = answer(text)
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
        made = together(events(chat(TOOLS | {"stream": True}, ScriptedLLM(text, step=5)).text))
        assert (made["calls"], made["content"]) == ([call["function"]], None)


@pytest.mark.parametrize(
    "body",
    [{}, TOOLS | {"tool_choice": "none"}, {"tools": [NOW]}, TOOLS | {"response_format": {"type": "json_object"}}],
)
def test_json_that_nobody_offered_as_a_call_is_text(body: dict[str, Any]) -> None:
    """Where an answer must follow a schema, its JSON is the answer."""
    assert answer(BARE, body)["message"] == {"role": "assistant", "content": BARE, "refusal": None}


def test_calls_that_are_not_asked_for_are_content() -> None:
    for body in ({}, TOOLS | {"tool_choice": "none"}):
        assert answer(CALL, body)["message"]["content"] == CALL
    found = chat(TOOLS, ScriptedLLM(CALL), tool_parser="none")
    assert found.json()["choices"][0]["message"]["content"] == CALL


@pytest.mark.covering
@pytest.mark.parametrize("step", [1, 2, 3, 7, 50, 1_000])
@pytest.mark.parametrize("text", ["Hello <b>", TWO, CALL, f"{CALL} Done."])
def test_a_stream_put_together_is_the_whole_answer(text: str, step: int) -> None:
    whole = answer(text)
    made = together(events(chat(TOOLS | {"stream": True}, ScriptedLLM(text, step=step)).text))
    calls = [call["function"] for call in whole["message"].get("tool_calls", [])]
    assert made == {"content": whole["message"]["content"], "calls": calls, "reason": whole["finish_reason"]}


def test_a_stream_says_the_name_first_then_arguments_as_they_come() -> None:
    pieces = events(chat(TOOLS | {"stream": True}, ScriptedLLM(CALL, step=2)).text)
    first, *deltas, last = [piece["choices"][0]["delta"] for piece in pieces]
    assert first == {"role": "assistant", "content": None}
    assert last == {}
    begin, *more = [call for delta in deltas for call in delta["tool_calls"]]
    assert (begin["index"], begin["function"]) == (0, {"name": "get_weather", "arguments": ""})
    assert len(more) > 5
    assert all(set(call) == {"index", "function"} for call in more)
    assert json.loads("".join(call["function"]["arguments"] for call in more)) == {"city": "Bern"}


def test_no_part_of_a_mark_is_content_before_it_is_sure_to_be_none() -> None:
    for piece in events(chat(TOOLS | {"stream": True}, ScriptedLLM(f"Wait. {CALL}", step=1)).text):
        assert "<" not in (piece["choices"][0]["delta"].get("content") or "")


def test_a_call_that_breaks_off_in_a_stream_is_not_said_to_be_complete() -> None:
    made = together(events(chat(TOOLS | {"stream": True}, ScriptedLLM(BROKEN)).text))
    assert made["reason"] == "stop"
    assert made["calls"] == [{"name": "now", "arguments": '{"a": '}]
    assert made["content"] == "x}}</tool_call>"
    cut = together(events(chat(TOOLS | {"stream": True}, ScriptedLLM(CALL[:-18], reason="length")).text))
    assert cut["reason"] == "length"


def test_log_probabilities_of_all_tokens_are_told() -> None:
    body = TOOLS | {"logprobs": True}
    whole = answer(TWO, body)["logprobs"]["content"]
    pieces = events(chat(body | {"stream": True}, ScriptedLLM(TWO)).text)
    told = [item for piece in pieces if (found := piece["choices"][0]["logprobs"]) for item in found["content"]]
    assert told == whole
    assert len(whole) == -(-len(TWO) // 3)


def test_one_call_at_most() -> None:
    body = TOOLS | {"parallel_tool_calls": False}
    assert [call["function"]["name"] for call in answer(TWO, body)["message"]["tool_calls"]] == ["get_weather"]
    made = together(events(chat(body | {"stream": True}, ScriptedLLM(TWO)).text))
    assert [call["name"] for call in made["calls"]] == ["get_weather"]


def test_the_end_of_the_length_stays_the_reason() -> None:
    assert answer(f"{CALL} and", reason="length")["finish_reason"] == "length"


def constraint(**body: Any) -> Any:
    """What the engine is told that the answer must follow."""
    llm = ScriptedLLM(CALL)
    found = chat(TOOLS | body, llm)
    assert found.status_code == 200, found.text
    params = llm.asked[0].params
    assert params.json_schema is None or params.structural_tag is None
    return params.structural_tag or params.json_schema


def tags(found: Any) -> dict[str, Any]:
    return {
        json.loads(tag["begin"][len("<tool_call>\n") :] + "0}")["name"]: tag["content"]["json_schema"]
        for tag in found["tags"]
    }


def test_a_call_that_is_required_is_held_to_name_and_schema() -> None:
    assert constraint() is constraint(tool_choice="auto") is constraint(tool_choice="none") is None
    both = constraint(tool_choice="required")
    assert (both["type"], both["at_least_one"], both["stop_after_first"]) == ("tags_with_separator", True, False)
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    assert tags(both) == {"get_weather": CITY, "now": empty}
    assert constraint(tool_choice="required", parallel_tool_calls=False)["stop_after_first"]
    one = constraint(tool_choice={"type": "function", "function": {"name": "now"}})
    assert tags(one) == {"now": empty}
    assert one["stop_after_first"]


def test_strict_tools_are_held_to_their_schema_where_they_are_called() -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    found = constraint(tools=[strict, NOW])
    assert (found["type"], found["triggers"], found["at_least_one"]) == ("triggered_tags", ["<tool_call>"], False)
    assert tags(found) == {"get_weather": CITY, "now": {"type": "object"}}


def test_an_answer_of_json_may_be_a_call_instead() -> None:
    found = constraint(response_format={"type": "json_object"})
    assert found["type"] == "or"
    assert found["elements"][0]["json_schema"] == {"type": "object"}
    assert tags(found["elements"][1]).keys() == {"get_weather", "now"}
    assert constraint(response_format={"type": "json_object"}, tool_choice="none") == {"type": "object"}


def test_tools_may_be_named_by_the_choice_alone_if_they_are_there() -> None:
    llm = ScriptedLLM(TWO)
    found = chat(TOOLS | {"tool_choice": {"type": "function", "function": {"name": "now"}}}, llm)
    (call,) = found.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "now"
    assert '"get_weather"' in llm.prompt()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "at least one is not in tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}} | TOOLS,
            "tool_choice",
            "'x' is not in tools",
        ),
        ({"tool_choice": "always"} | TOOLS, "tool_choice", "tool_choice"),
        ({"tools": [NOW, NOW]}, "tools", "two tools are called 'now'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "name"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}],
                "tool_choice": "required",
            },
            "tools",
            "'a' must be of type 'object', not 'string'",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": f"f{n}", "parameters": {"title": "x" * 90_000}}}
                    for n in range(2)
                ],
                "tool_choice": "required",
            },
            "tools",
            "may have 131,072 together",
        ),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}} | TOOLS,
            "response_format",
            "leave one",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(body: dict[str, Any], param: str, words: str) -> None:
    llm = ScriptedLLM(CALL)
    refused = chat(body, llm)
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert error["param"].startswith(param)
    assert words in error["message"]
    assert not llm.asked


def test_without_a_format_no_call_can_be_required() -> None:
    refused = chat(TOOLS | {"tool_choice": "required"}, ScriptedLLM(CALL), tool_parser="none")
    assert refused.status_code == 400
    assert "--tool-parser" in refused.json()["error"]["message"]


def test_answers_of_several_turns_come_back_to_the_template() -> None:
    llm = ScriptedLLM(TWO, "It is sunny.")
    said: list[Any] = [{"role": "user", "content": "Weather?"}]
    for _ in range(2):
        message = chat(TOOLS | {"messages": said}, llm).json()["choices"][0]["message"]
        said.append(message)
        calls = message.get("tool_calls", [])
        said += [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
    assert said[-1]["content"] == "It is sunny."
    assert f"assistant: Let me look.{CALL}<tool_call>" in llm.prompt()
    assert chat(TOOLS | {"messages": [*said, {"role": "user", "content": "Thanks"}]}, llm).status_code == 200


def test_marks_that_are_special_tokens_stay_in_the_text() -> None:
    llm = ScriptedLLM(CALL)
    llm.tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "<other>"]})
    llm.vocab_size = len(llm.tokenizer)
    chat(TOOLS, llm)
    chat({}, llm)
    mark = llm.tokenizer.convert_tokens_to_ids("<tool_call>")
    assert [request.params.kept_special_tokens for request in llm.asked] == [(mark,), ()]
