"""POST /v1/responses: with OpenAI's own client against the real engine, and its fields against one that counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from millpond.engine.async_llm import AsyncLLM
from millpond.errors import MillpondError
from server.test_chat import templated
from server.test_completions import ask
from server.test_guided import bytes_llm
from tests.helpers.evals.small import tiny_model, tiny_tokenizer
from tests.helpers.server.fake import TOKEN_BYTES, FakeLLM
from tests.helpers.server.live import live
from tests.helpers.server.scripted import ScriptedLLM

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": CITY}
NOW: dict[str, Any] = {"type": "function", "name": "now"}
CALLED: dict[str, Any] = {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{}"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
BROKEN = '<tool_call>{"name": "now", "arguments": {"a": x}}</tool_call>'


def respond(body: dict[str, Any], llm: FakeLLM | None = None, **settings: Any) -> Any:
    return ask({"input": "w5 w6"} | body, llm or templated(), "/v1/responses", **settings)


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names and numbers are checked."""
    found = []
    for number, part in enumerate(part for part in text.split("\n\n") if part):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        found.append(event)
    return found


def read(body: dict[str, Any]) -> str:
    """What the engine was given, as text."""
    llm = templated()
    assert (found := respond(body, llm)).status_code == 200, found.text
    return str(llm.tokenizer.decode(llm.asked[0].prompt))


def test_a_response_has_a_message_and_numbers() -> None:
    found = respond({"max_output_tokens": 2, "metadata": {"a": "b"}, "temperature": 0.5}).json()
    assert (found["object"], found["status"], found["store"]) == ("response", "incomplete", False)
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [{"type": "output_text", "text": " w51 w52", "annotations": [], "logprobs": []}]
    assert (found["metadata"], found["temperature"], found["max_output_tokens"]) == ({"a": "b"}, 0.5, 2)
    usage = found["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (3, 2, 5)
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    assert usage["millpond"]["full_kv_bytes"] == 5 * TOKEN_BYTES
    assert found["millpond"]["finish_reason"] == "length"


def test_an_answer_that_ends_by_itself_is_completed() -> None:
    llm = templated()
    llm.reason = "stop"
    found = respond({"max_output_tokens": 2}, llm).json()
    assert (found["status"], found["output"][0]["status"], found["incomplete_details"]) == ("completed",) * 2 + (None,)


@pytest.mark.parametrize("body", [{}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}])
def test_a_stream_put_together_is_the_whole_response(body: dict[str, Any]) -> None:
    whole = respond(body | {"max_output_tokens": 4}).json()
    found = events(respond(body | {"max_output_tokens": 4, "stream": True}).text)
    names = [event["type"].removeprefix("response.") for event in found]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    (part,) = whole["output"][0]["content"]
    deltas = [event for event in found if event["type"].endswith("delta")]
    assert "".join(event["delta"] for event in deltas) == part["text"] == found[-4]["text"]
    assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"] == found[-3]["part"]["logprobs"]
    assert len(part["logprobs"]) == (4 if body else 0)
    last = found[-1]["response"]
    assert last["id"] == found[0]["response"]["id"]
    assert last["output"] == [found[-2]["item"]]
    assert last["output"][0]["id"] == found[2]["item"]["id"] == deltas[0]["item_id"]
    same = whole.keys() - {"id", "created_at", "output", "usage"}
    assert {name: last[name] for name in same} == {name: whole[name] for name in same}


def test_an_error_in_a_stream_is_a_response_that_failed() -> None:
    llm = templated()
    llm.fails = MillpondError("the model broke")
    last = events(respond({"stream": True}, llm).text)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    error = last["response"]["error"]
    assert (error["code"], error["message"]) == ("server_error", "the model broke")


def test_inputs_become_a_chat() -> None:
    assert read({}) == "w5 w6 w50"
    parts = [{"type": "input_text", "text": "w5 "}, {"type": "input_text", "text": "w7"}]
    assert read({"input": [{"role": "user", "content": parts}]}) == "w5 w7 w50"
    turns = [("user", "w5"), ("assistant", "w8"), ("user", "w9")]
    said = [{"role": role, "content": content} for role, content in turns]
    assert read({"input": said}) == "w5 w8 w9 w50"
    llm = FakeLLM()  # whose template knows no system
    assert respond({"instructions": "w4"}, llm).status_code == 200
    assert llm.tokenizer.decode(llm.asked[0].prompt).count("w4") == 1


def test_a_response_may_come_back_as_it_was() -> None:
    first = respond({"max_output_tokens": 2, "include": ["message.output_text.logprobs"]}).json()
    said = [{"role": "user", "content": "w5"}, *first["output"], {"role": "user", "content": "w9"}]
    assert read({"input": said}) == "w5 w51 w52 w9 w50"


def test_fields_reach_the_engine() -> None:
    llm = templated()
    body = {
        "temperature": 0,
        "top_p": 0.5,
        "seed": 3,
        "top_k": 4,
        "max_output_tokens": 7,
        "min_tokens": 2,
        "cache_salt": "x",
        "millpond": {"priority": 5, "watch": True},
        "store": True,
        "user": "me",
        "tools": [],
        "service_tier": "auto",
        "truncation": "disabled",
        "previous_response_id": None,
        "reasoning": None,
    }
    found = respond(body, llm).json()
    (request,) = llm.asked
    params = request.params
    assert (params.temperature, params.top_p, params.seed, params.top_k) == (0, 0.5, 3, 4)
    assert (params.max_tokens, params.min_tokens) == (7, 2)
    assert (request.priority, request.watch, request.request_id) == (5, True, found["id"])
    assert request.cache_salt not in ("x", None)
    assert found["store"] is False


def test_formats_become_schemas() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "default": None}}}
    for wanted, expected in [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "name": "x", "schema": schema, "strict": True}, schema),
    ]:
        llm = templated()
        found = respond({"text": {"format": wanted}}, llm)
        assert llm.asked[0].params.json_schema == expected
        assert found.json()["text"] == {"format": wanted}


def said_of(items: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Items without their ids."""
    return [
        (item["status"], item["content"][0]["text"])
        if item["type"] == "message"
        else (item["status"], item["name"], item["arguments"])
        for item in items
    ]


@pytest.mark.covering
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello <b>", [("completed", "Hello <b>")]),
        ("", [("completed", "")]),
        (CALL, [("completed", "get_weather", '{"city": "Bern"}')]),
        (CALL[12:-13], [("completed", "get_weather", '{"city": "Bern"}')]),
        (f"```json\n{CALL[12:-13]}\n```", [("completed", "get_weather", '{"city": "Bern"}')]),
        (
            f"Wait.\n{CALL}{CALL}\nDone.",
            [
                ("completed", "Wait."),
                *[("completed", "get_weather", '{"city": "Bern"}')] * 2,
                ("completed", "\n\nDone."),
            ],
        ),
    ],
)
@pytest.mark.parametrize("step", [1, 5, 1_000])
def test_calls_are_items_whole_and_streamed(text: str, expected: list[tuple[str, ...]], step: int) -> None:
    body = {"tools": [WEATHER, NOW]}
    whole = respond(body, ScriptedLLM(text)).json()
    assert (whole["status"], said_of(whole["output"])) == ("completed", expected)
    found = events(respond(body | {"stream": True}, ScriptedLLM(text, step=step)).text)
    assert said_of(found[-1]["response"]["output"]) == expected
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == (
        found[-1]["response"]["output"]
    )
    for place, item in enumerate(found[-1]["response"]["output"]):
        own = [event for event in found if event.get("output_index") == place and event["type"].endswith("delta")]
        written = item["content"][0]["text"] if item["type"] == "message" else item["arguments"]
        assert "".join(event["delta"] for event in own) == written
        assert {event["item_id"] for event in own} <= {item["id"]}


def test_a_call_that_breaks_off_is_text_and_incomplete_in_a_stream() -> None:
    assert said_of(respond({"tools": [NOW]}, ScriptedLLM(BROKEN)).json()["output"]) == [("completed", BROKEN)]
    last = events(respond({"tools": [NOW], "stream": True}, ScriptedLLM(BROKEN)).text)[-1]["response"]
    assert [item[0] for item in said_of(last["output"])] == ["incomplete", "completed"]


def test_what_was_called_and_answered_becomes_a_chat() -> None:
    """As the client holds it; calls belong to what was said before them, and no item vanishes."""
    llm = ScriptedLLM(f"Wait. {CALL}\n{CALL}", "Sunny.")
    said: list[Any] = [{"role": "user", "content": "mark1"}]
    first = respond({"input": said, "tools": [WEATHER]}, llm).json()["output"]
    results = [
        {"type": "function_call_output", "call_id": one["call_id"], "output": output}
        for one, output in zip(first[1:], ["mark2", [{"type": "input_text", "text": "mark3"}]], strict=True)
    ]
    said += [*first, *results, CALLED, {"type": "function_call_output", "call_id": "call_1", "output": "mark4"}]
    assert respond({"input": said, "tools": [WEATHER, NOW]}, llm).status_code == 200
    prompt = llm.prompt()
    assert f"user: mark1assistant: Wait.{CALL}{CALL}tool: mark2tool: mark3assistant: <tool_call>" in prompt
    assert '{"name": "now", "arguments": {}}' in prompt
    assert "tool: mark4" in prompt
    assert "The weather." in prompt


def test_choices_of_tools() -> None:
    llm = ScriptedLLM(CALL)
    chosen = {"type": "function", "name": "now"}
    found = respond({"tools": [WEATHER, NOW], "tool_choice": chosen, "parallel_tool_calls": False}, llm).json()
    assert (found["tool_choice"], [tool["name"] for tool in found["tools"]]) == (chosen, ["get_weather", "now"])
    assert "get_weather" not in str(llm.asked[0].params.structural_tag)
    none = respond({"tools": [WEATHER], "tool_choice": "none"}, llm).json()
    assert said_of(none["output"]) == [("completed", CALL)]
    assert "The weather." not in llm.prompt()
    text = {"format": {"type": "json_schema", "name": "x", "schema": CITY}}
    respond({"tools": [WEATHER | {"strict": True}], "text": text}, llm)
    assert "json_schema" in str(llm.asked[2].params.structural_tag)
    assert llm.asked[2].params.json_schema is None
    assert "leave out tools" in respond({"tools": [NOW], "top_logprobs": 2}, llm).json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"previous_response_id": "resp_1"},
            "nothing is stored; send the conversation so far, answers included, as input",
        ),
        ({"conversation": "c"}, "nothing is stored"),
        ({"background": True}, "nothing is stored"),
        ({"tools": [{"type": "web_search"}]}, "a tool of type 'web_search' is not run here"),
        ({"tools": [5]}, "tools.0"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "at least one"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "x"}}, "'x' is not in tools"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "call_id"),
        ({"input": [CALLED | {"arguments": "{"}]}, "must be JSON"),
        ({"input": [CALLED | {"arguments": "[1]"}]}, "object"),
        ({"input": [CALLED | {"arguments": '{"a":' * 5_000}]}, "must be JSON"),
        ({"input": [CALLED | {"arguments": '{"a":"' + "x" * 200_000 + '"}'}]}, "characters of JSON"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": 5}]}, "output"),
        ({"input": [{"type": "reasoning"}]}, "'message'"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "tool", "content": "w5"}]}, "role"),
        ({"reasoning": {"effort": "low"}}, "chat_template_kwargs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "did you mean 'min_tokens'"),
        ({"max_output_tokens": 62}, "context holds 64"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "no such setting"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"n": 2}, "unknown field 'n'"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "can follow one of them"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(body: dict[str, Any], words: str) -> None:
    found = respond(body)
    assert found.status_code == 400, found.text
    assert words in found.json()["error"]["message"]


def test_the_servers_limit_holds() -> None:
    found = respond({"max_output_tokens": 9}, max_tokens=8)
    assert found.json()["error"]["message"] == "max_output_tokens=9: this server gives at most 8"
    llm = templated()
    respond({}, llm, max_tokens=8)
    assert llm.asked[0].params.max_tokens == 8


def tiny_llm() -> AsyncLLM:
    return AsyncLLM(tiny_model(), tokenizer=tiny_tokenizer(), model_name="tiny", method="full")


def client_at(make: Callable[[], AsyncLLM]) -> Iterator[openai.OpenAI]:
    with live(make) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


class TestOpenAI:
    """The real client, the real engine."""

    @pytest.fixture(scope="module")
    @staticmethod
    def client() -> Iterator[openai.OpenAI]:
        yield from client_at(tiny_llm)

    def test_plain(self, client: openai.OpenAI) -> None:
        found = client.responses.create(model="tiny", input="w5 w6 w7", max_output_tokens=5, temperature=0)
        assert found.status == "incomplete"
        assert found.output_text
        assert found.usage is not None
        assert found.usage.output_tokens == 5

    def test_several_turns(self, client: openai.OpenAI) -> None:
        """The answer goes back as the client holds it, and counts as what was said."""
        said: list[Any] = [{"role": "user", "content": "w5 w6"}]
        first = client.responses.create(model="tiny", input=said, max_output_tokens=5, temperature=0)
        said += first.output
        said.append({"role": "user", "content": "w9"})
        second = client.responses.create(model="tiny", input=said, max_output_tokens=5, temperature=0)
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.total_tokens

    def test_streams(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": "tiny", "input": "w5 w6", "max_output_tokens": 6, "temperature": 0}
        whole = client.responses.create(**asked)
        text = ""
        for event in client.responses.create(**asked, stream=True):
            if event.type == "response.output_text.delta":
                text += event.delta
        assert text == whole.output_text
        with client.responses.stream(**asked) as stream:
            kinds = {event.type: event for event in stream}
        assert kinds["response.incomplete"].response.output_text == whole.output_text

    def test_tools(self) -> None:
        """A call, its result, and the answer, whole and streamed; the items go back as the client holds them."""
        with live(lambda: ScriptedLLM("")) as server:
            asks = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            for streamed in (False, True):
                server.llm.says(f"Wait. {CALL}", "Sunny.")
                said: list[Any] = [{"role": "user", "content": "How is it?"}]
                for _ in range(2):
                    tools = [WEATHER | {"strict": False}]
                    fields: dict[str, Any] = {"model": "fake/counter", "input": said, "tools": tools}
                    if streamed:
                        with asks.responses.stream(**fields) as stream:
                            kinds = [event.type for event in stream]
                            found = stream.get_final_response()
                    else:
                        found = asks.responses.create(**fields)
                    said += found.output
                    calls = [item for item in found.output if item.type == "function_call"]
                    said += [{"type": "function_call_output", "call_id": one.call_id, "output": "sun"} for one in calls]
                assert found.output_text == "Sunny."
                assert f"Wait.{CALL}tool: sun" in server.llm.prompt()
            assert "response.output_text.done" in kinds

    def test_what_is_refused(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="nothing is stored"):
            client.responses.create(model="tiny", input="w5", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError, match="'other' is not here"):
            client.responses.create(model="other", input="w5")

    def test_langchain(self, client: openai.OpenAI) -> None:
        """Its client goes back to this interface for what it sends, several turns and streams."""
        lang = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
        model = lang.ChatOpenAI(
            model="tiny",
            base_url=str(client.base_url),
            api_key="none",
            use_responses_api=True,
            max_tokens=5,
            temperature=0,
            max_retries=0,
        )
        first = model.invoke([("system", "w4"), ("user", "w5")])
        assert first.usage_metadata["output_tokens"] == 5
        second = model.invoke([("user", "w5"), first, ("user", "w6")])
        assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
        pieces = [part["text"] for piece in model.stream([("system", "w4"), ("user", "w5")]) for part in piece.content]
        assert "".join(pieces) == first.content[0]["text"]


class Mill(pydantic.BaseModel):
    wheels: Literal[1, 2, 3]
    on: bool


class TestWithXgrammar:
    @pytest.fixture(autouse=True)
    def _needs_xgrammar(self) -> None:
        pytest.importorskip("xgrammar", reason="the extra 'constrained' is not installed: pip install xgrammar")

    @pytest.fixture(scope="module")
    @staticmethod
    def client() -> Iterator[openai.OpenAI]:
        yield from client_at(bytes_llm)

    def test_parsed(self, client: openai.OpenAI) -> None:
        found = client.responses.parse(model="bytes", input="a mill", text_format=Mill, max_output_tokens=300)
        assert isinstance(found.output_parsed, Mill)
        assert found.status == "completed"
        said: list[Any] = [*found.output, {"role": "user", "content": "b"}]
        again = client.responses.parse(model="bytes", input=said, text_format=Mill, max_output_tokens=300)
        assert isinstance(again.output_parsed, Mill)

    def test_parsed_from_a_stream(self, client: openai.OpenAI) -> None:
        with client.responses.stream(model="bytes", input="a", text_format=Mill, max_output_tokens=300) as stream:
            found = stream.get_final_response()
        assert isinstance(found.output_parsed, Mill)
