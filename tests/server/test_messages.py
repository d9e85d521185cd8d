"""Anthropic's interface: conversations become chats, answers become blocks, whole and as events, and errors its own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError

from millpond.engine.outputs import Completion
from millpond.server.anthropic_chat import chat_messages, chat_of
from millpond.server.anthropic_format import MessagesCall
from millpond.server.anthropic_schemas import MessagesBody
from server.test_chat import templated
from server.test_completions import ask
from tests.helpers.server.fake import FakeLLM, client_of
from tests.helpers.server.scripted import ScriptedLLM

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "The weather.", "input_schema": CITY}
TOOLS: list[dict[str, Any]] = [WEATHER, {"name": "now", "input_schema": {}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TWO = f'Let me look.\n{CALL}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>'
BROKEN = '<tool_call>{"name": "now", "arguments": {"a": x}}</tool_call>'
HELLO = {"role": "user", "content": "w5 w6"}


def send(body: dict[str, Any], llm: FakeLLM | None = None, path: str = "/v1/messages", **settings: Any) -> Any:
    given = {"messages": [HELLO]} | ({} if path.endswith("count_tokens") else {"max_tokens": 8})
    return ask(given | body, llm or templated(), path, **settings)


def answer(text: str, **body: Any) -> dict[str, Any]:
    found = send({"tools": TOOLS, "max_tokens": 100} | body, ScriptedLLM(text))
    assert found.status_code == 200, found.text
    return dict(found.json())


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each under the name that it has itself."""
    found = []
    for part in text.split("\n\n"):
        if part:
            name, data = part.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events say, as clients put it together."""
    start, *more, delta, stop = found
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in more:
        match event["type"]:
            case "content_block_start":
                assert (is_open, event["index"]) == (False, len(blocks))
                blocks.append(event["content_block"] | {"json": ""})
                is_open = True
            case "content_block_delta":
                assert (is_open, event["index"]) == (True, len(blocks) - 1)
                blocks[-1]["text" if event["delta"]["type"] == "text_delta" else "json"] += event["delta"].get(
                    "text"
                ) or event["delta"].get("partial_json")
            case "content_block_stop":
                assert (is_open, event["index"]) == (True, len(blocks) - 1)
                is_open = False
            case other:
                assert other == "ping"
    assert not is_open
    for block in blocks:
        if given := block.pop("json"):
            block["input"] = json.loads(given)
    return start["message"] | delta["delta"] | {"content": blocks}


def without_ids(message: dict[str, Any]) -> Any:
    return (
        message["stop_reason"],
        message["stop_sequence"],
        [{name: value for name, value in block.items() if name != "id"} for block in message["content"]],
    )


def test_an_answer_has_blocks_a_reason_and_numbers() -> None:
    found = send({"max_tokens": 2})
    message = found.json()
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake/counter")
    assert without_ids(message) == ("max_tokens", None, [{"type": "text", "text": " w51 w52"}])
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (0, 3, 2)
    assert usage["cache_creation_input_tokens"] == 0
    assert found.headers["request-id"].startswith("req_")


def test_calls_are_blocks_of_their_own() -> None:
    reason, _, blocks = without_ids(answer(TWO))
    assert (reason, [block["type"] for block in blocks]) == ("tool_use", ["text", "tool_use", "tool_use"])
    assert [block.get("input") for block in blocks] == [None, {"city": "Bern"}, {}]
    assert blocks[0]["text"] == "Let me look."
    assert len({block["id"] for block in answer(TWO)["content"][1:]}) == 2


@pytest.mark.covering
@pytest.mark.parametrize("step", [1, 2, 7, 1_000])
@pytest.mark.parametrize("text", ["Hello <b>", TWO, CALL, f"{CALL} Done.", CALL[12:-13], ""])
def test_a_stream_put_together_is_the_whole_answer(text: str, step: int) -> None:
    body = {"tools": TOOLS, "max_tokens": 100, "stream": True}
    streamed = events(send(body, ScriptedLLM(text, step=step)).text)
    assert without_ids(together(streamed)) == without_ids(answer(text))
    assert [event["type"] for event in streamed].count("ping") == 1


def test_a_call_that_breaks_off_is_text_and_no_reason() -> None:
    assert without_ids(answer(BROKEN)) == ("end_turn", None, [{"type": "text", "text": BROKEN}])
    streamed = events(send({"tools": TOOLS, "stream": True}, ScriptedLLM(BROKEN)).text)
    assert streamed[-2]["delta"]["stop_reason"] == "end_turn"


@pytest.mark.parametrize("written", ['{"a": 1e999}', '{"a": "\\ud83d"}', '{"\\udc00": [-1e400]}'])
def test_what_json_cannot_send_of_a_model_s_own_writing_is_sent_as_near(written: str) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>'
    (block,) = answer(text)["content"]
    assert len(block["input"]) == 1


@pytest.mark.parametrize(
    ("reason", "stopped", "tokens", "calls", "said"),
    [
        ("stop", None, 3, 0, ("end_turn", None)),
        ("stop", "END", 3, 0, ("stop_sequence", "END")),
        ("stop", "\nUser:", 3, 0, ("end_turn", None)),
        ("stop", 7, 3, 0, ("end_turn", None)),
        ("stop", None, 3, 1, ("tool_use", None)),
        ("length", None, 5, 0, ("max_tokens", None)),
        ("length", None, 5, 1, ("max_tokens", None)),
        ("length", None, 4, 0, ("model_context_window_exceeded", None)),
        ("deadline", None, 4, 0, ("max_tokens", None)),
        ("cancelled", None, 4, 0, ("max_tokens", None)),
    ],
)
def test_reasons(reason: Any, stopped: Any, tokens: int, calls: int, said: tuple[str, str | None]) -> None:
    job = MessagesCall("msg_1", [], None, False, most=5, stops=("END",))
    end = job.end(Completion(0, "x", tuple(range(tokens)), None, reason, stopped), calls)
    assert (end["stop_reason"], end["stop_sequence"]) == said


#: Every kind of block in every place where it may stand, each with a mark of its own.
MANY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "mark1"}, {"type": "text", "text": "mark2"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "secret", "signature": "abc"},
            {"type": "text", "text": "mark3"},
            {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "mark4"}},
            {"type": "tool_use", "id": "call_2", "name": "get_weather", "input": {"city": "mark5"}, "caller": None},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": "mark6"},
            {
                "type": "tool_result",
                "tool_use_id": "call_2",
                "is_error": True,
                "content": [{"type": "text", "text": "mark7"}, {"type": "text", "text": "mark8"}],
            },
            {"type": "text", "text": "mark9"},
            {"type": "text", "text": "mark10"},
        ],
    },
    {"role": "assistant", "content": "mark11"},
    {"role": "system", "content": "mark12"},
    {"role": "user", "content": [{"type": "text", "text": "mark13"}, {"type": "tool_result", "tool_use_id": "call_2"}]},
]


def test_no_message_vanishes_and_all_stay_in_order() -> None:
    llm = ScriptedLLM("Hi")
    system = [{"type": "text", "text": "mark0"}, {"type": "text", "text": "mark-"}]
    assert send({"messages": MANY, "system": system, "tools": TOOLS}, llm).status_code == 200
    prompt = llm.prompt()
    marks = ["mark0", "mark-", *(f"mark{number}" for number in range(1, 14))]
    places = [prompt.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "system: mark0\nmark-" in prompt
    assert "user: mark1\nmark2" in prompt
    assert "tool: mark6tool: Error: mark7\nmark8user: mark9\nmark10" in prompt
    assert prompt.count("tool: ") == 3


def body_of(**fields: Any) -> MessagesBody:
    return MessagesBody.model_validate_json(json.dumps({"messages": [HELLO], "max_tokens": 8} | fields))


def test_thoughts_are_those_of_the_answer() -> None:
    messages = chat_messages(body_of(messages=MANY))
    assert [message.reasoning_content for message in messages if message.role == "assistant"] == ["secret", None]
    assert [message.tool_call_id for message in messages if message.role == "tool"] == ["call_1", "call_2", "call_2"]


def test_marks_of_the_cache_stay_where_they_are() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "a"} | mark]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "now", "input": {}} | mark]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1"} | mark, {"type": "text", "text": "b"}],
        },
    ]
    system = [{"type": "text", "text": "s"}, {"type": "text", "text": "t"} | mark]
    tools = [TOOLS[0] | mark]
    body = body_of(messages=said, system=system, tools=tools, **mark)
    assert [one.ends_with_breakpoint for one in chat_messages(body)] == [True, True, True, True, False]
    assert send({"messages": said, "system": system, "tools": tools} | mark, ScriptedLLM("x")).status_code == 200
    many = [{"role": role, "content": [{"type": "text", "text": "a"} | mark]} for role in ("user", "assistant") * 3]
    assert "6 messages have cache_control" in send({"messages": many}).json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"tool_choice": {"type": "auto"}, "tools": TOOLS}, "tool_choice", "auto"),
        ({"tool_choice": {"type": "any"}, "tools": TOOLS}, "tool_choice", "required"),
        ({"tool_choice": {"type": "none"}, "tools": TOOLS}, "tool_choice", "none"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "parallel_tool_calls", False),
        ({"stop_sequences": ["a", "b"]}, "stop", ["a", "b"]),
        ({"top_k": 5}, "top_k", 5),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"temperature": 0}, "temperature", 0),
        ({"metadata": {"user_id": None}}, "metadata", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "chat_template_kwargs", {"enable_thinking": True}),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}},
            "chat_template_kwargs",
            {"enable_thinking": False, "reasoning_effort": "high"},
        ),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, "tools", None),
        ({"speed": "standard", "inference_geo": "eu", "mcp_servers": []}, "continue_final_message", False),
    ],
)
def test_fields_mean_what_they_mean_in_a_chat(body: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(chat_of(body_of(**body), True), field) == value


def test_what_answers_must_follow_reaches_the_engine() -> None:
    llm = ScriptedLLM("{}")
    send({"output_config": {"format": {"type": "json_schema", "schema": CITY}}}, llm)
    assert llm.asked[0].params.json_schema == CITY
    send({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "now"}}, llm)
    assert "now" in str(llm.asked[1].params.structural_tag)
    assert "get_weather" not in str(llm.asked[1].params.structural_tag)


def test_examples_of_a_tool_s_input_are_shown() -> None:
    llm = ScriptedLLM("x")
    send({"tools": [TOOLS[0] | {"input_examples": [{"city": "Chur"}], "type": "custom"}]}, llm)
    assert "The weather." in llm.prompt()
    assert "Chur" in llm.prompt()


def test_more_tokens_than_the_context_holds_are_an_upper_bound() -> None:
    """Coding agents ask for 32,000, whatever the model."""
    llm = templated()
    assert send({"max_tokens": 32_000}, llm).status_code == 200
    assert llm.asked[0].params.max_tokens == llm.context_length - 3
    full = send({"messages": [{"role": "user", "content": "w5 " * 70}]}, templated())
    assert (full.status_code, full.json()["error"]["type"]) == (400, "invalid_request_error")


def test_an_answer_that_has_begun_is_continued() -> None:
    llm = ScriptedLLM("go on")
    said = [HELLO, {"role": "assistant", "content": "The answer is ("}]
    assert send({"messages": said}, llm).status_code == 200
    assert llm.prompt().endswith("assistant: The answer is (")
    assert send({"messages": said}, FakeLLM()).status_code == 200  # without a template


def test_tokens_are_counted_as_they_are_read() -> None:
    body = {"messages": MANY, "system": "mark0", "tools": TOOLS, "tool_choice": {"type": "auto"}}
    found = send(body, ScriptedLLM("x"), "/v1/messages/count_tokens")
    usage = send(body, ScriptedLLM("x")).json()["usage"]
    assert found.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    fewer = send(body | {"tool_choice": {"type": "none"}}, ScriptedLLM("x"), "/v1/messages/count_tokens")
    assert fewer.json()["input_tokens"] < found.json()["input_tokens"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "a block of type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "a block of type 'document'"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "a block of type 'image'",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "runs no tools of its own"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "leave it out"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "x", "input": {}}]}]},
            "the role 'user' has no block of type 'tool_use'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
            "'assistant'",
        ),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "a block has a type"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "web_search_"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [5]}, "tools.0"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "'x' is not in tools"),
        ({"tool_choice": {"type": "any"}}, "at least one"),
        ({"stop": ["x"]}, "stop"),
        ({"foo": 1}, "unknown field 'foo'"),
        ({"keep": [[0, 1]]}, "unknown field 'keep'; did you mean 'millpond.keep'?"),
        ({"containr": None}, "did you mean 'container'"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"thinking": {"type": "fast"}}, "thinking"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": TOOLS * 100}, "tools"),
    ],
)
def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    found = send(body)
    assert found.status_code == 400, found.text
    error = found.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]
    assert found.headers["request-id"] == error["request_id"]


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = {"a": [found]}
    return found


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": deep(60)}]},
        {"tools": [TOOLS[0] | {"input_schema": deep(150)}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "x", "input": {"a": "x" * 200_000}}],
                }
            ]
        },
        {"tools": [TOOLS[0] | {"input_schema": {"a": "x" * 200_000}}]},
        {"system": "x" * 5_000_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 20_000}]},
        {"messages": [{"role": "user", "content": [{"type": "x" * 100_000}]}]},
        {"tools": [{"name": "x", "type": "y" * 100_000}]},
        {"stop_sequences": [""]},
        {"chat_template_kwargs": {"continue_final_message": True}},
        {"tools": [TOOLS[0] | {"input_schema": [1]}]},
    ],
    ids=lambda body: str(body)[:60],
)
def test_hostile_bodies_are_refused(body: dict[str, Any]) -> None:
    found = send(body, ScriptedLLM("x"))
    assert found.status_code in (400, 413), found.text[:300]
    assert found.json()["type"] == "error"
    assert len(found.text) < 2_000


@pytest.mark.parametrize(
    "body",
    [
        {"system": "\ud800"},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "\udfff"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "\udfff"}]}]},
        {"tools": [{"type": "\udfff", "name": "x"}]},
        {"\udfff": 1},
        {"messages": [HELLO], "system": [{"type": "text", "text": "\ud800"}]},
    ],
    ids=ascii,
)
def test_halves_of_surrogate_pairs_are_refused(body: dict[str, Any]) -> None:
    async def work() -> Any:
        async with client_of(ScriptedLLM("x")) as client:
            content = json.dumps({"messages": [HELLO], "max_tokens": 2} | body)
            return await client.post("/v1/messages", content=content, headers={"Content-Type": "application/json"})

    assert asyncio.run(work()).status_code == 400


def test_a_key_may_come_in_a_header_of_its_own() -> None:
    async def statuses() -> list[int]:
        async with client_of(templated(), api_keys=("one",)) as client:
            body = {"messages": [HELLO], "max_tokens": 2}
            tried: list[dict[str, str]] = [
                {"x-api-key": "one", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"},
                {"x-api-key": "two"},
                {"Authorization": "Bearer one"},
                {"Authorization": "Bearer two", "x-api-key": "one"},
                {},
                {"Authorization": "Basic b25l", "x-api-key": "one"},
            ]
            found = [await client.post("/v1/messages", json=body, headers=headers) for headers in tried]
            assert found[1].json()["error"]["type"] == "authentication_error"
            return [one.status_code for one in found]

    assert asyncio.run(statuses()) == [200, 401, 200, 401, 401, 200]


def test_other_routes_keep_their_errors() -> None:
    assert set(ask({"prompt": 5}).json()) == {"error"}
    assert send({}, path="/v1/messages/none").json()["type"] == "error"
    assert "error" in send({}, path="/v1/messagesx").json()
    assert "type" not in send({}, path="/v1/messagesx").json()


def test_the_conversation_as_a_chat_holds_what_chats_hold() -> None:
    """`chat_of` builds its body without checking again: the same values pass the check."""
    made = chat_of(body_of(messages=MANY, tools=TOOLS, tool_choice={"type": "any"}, top_k=3, system="x"), True)
    try:
        again = type(made).model_validate(made.model_dump(by_alias=True, exclude_none=True))
    except ValidationError as error:
        pytest.fail(str(error))
    assert [one.role for one in again.messages] == [one.role for one in made.messages]
