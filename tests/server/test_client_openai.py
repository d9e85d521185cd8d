"""OpenAI's own client: several turns, streams and tools, against a scripted engine, a random model and a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.helpers.models import needs_real_model
from tests.helpers.server.live import Live, live
from tests.helpers.server.scripted import ScriptedLLM
from tests.helpers.server.tools_model import ARGUMENTS, CALL, QUESTION, TOOL, WEATHER, check_arguments
from tests.helpers.server.tools_model import random as random  # the fixtures
from tests.helpers.server.tools_model import real as real

USER: dict[str, Any] = {"role": "user", "content": QUESTION}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


class Weather(BaseModel):
    city: str
    unit: str


@pytest.fixture(scope="module")
def scripted() -> Iterator[Live]:
    with live(lambda: ScriptedLLM("")) as running:
        yield running


def client(server: Live) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_turns_with_tools_whole(scripted: Live) -> None:
    scripted.llm.says(f"One moment. {CALL}", "Sunny.", "You are welcome.")
    said: list[Any] = [USER]
    with client(scripted) as asks:
        for _ in range(3):
            choice = asks.chat.completions.create(model="fake/counter", messages=said, tools=[TOOL]).choices[0]
            said.append(choice.message)
            for call in choice.message.tool_calls or ():
                assert choice.finish_reason == "tool_calls"
                assert json.loads(call.function.arguments) == ARGUMENTS
                said.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
            if choice.finish_reason == "stop":
                said.append({"role": "user", "content": "Thank you"})
    assert [one.content for one in said if not isinstance(one, dict)] == ["One moment.", "Sunny.", "You are welcome."]
    prompt = scripted.llm.prompt()
    assert f"One moment.{CALL}" in prompt
    assert "tool: sunny" in prompt


def test_messages_may_be_sent_back_as_plain_values(scripted: Live) -> None:
    """All that the client's own types hold, empty fields included."""
    scripted.llm.says(CALL, "Sunny.")
    with client(scripted) as asks:
        first = asks.chat.completions.create(model="fake/counter", messages=[USER], tools=[TOOL]).choices[0].message
        said = [USER, first.model_dump(), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}]
        second = asks.chat.completions.create(model="fake/counter", messages=said).choices[0].message
        asks.chat.completions.create(model="fake/counter", messages=[*said, second.model_dump(), USER])


def test_turns_with_tools_streamed(scripted: Live) -> None:
    """The client's own helper puts the stream together, and its message goes back."""
    scripted.llm.says(f"One moment. {CALL}", "Sunny.")
    said: list[Any] = [USER]
    names: list[str] = []
    with client(scripted) as asks:
        for _ in range(2):
            with asks.chat.completions.stream(model="fake/counter", messages=said, tools=[TOOL]) as stream:
                names += [event.type for event in stream]
                choice = stream.get_final_completion().choices[0]
            said.append(choice.message)
            for call in choice.message.tool_calls or ():
                assert json.loads(call.function.arguments) == ARGUMENTS
                said.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    assert said[-1].content == "Sunny."
    assert names.count("tool_calls.function.arguments.done") == 1
    assert names.count("tool_calls.function.arguments.delta") > 5
    assert f"One moment.{CALL}" in scripted.llm.prompt()


def test_the_client_parses_calls_of_its_own_strict_tools(scripted: Live) -> None:
    scripted.llm.says(CALL)
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    with client(scripted) as asks:
        parsed = asks.chat.completions.parse(model="fake/counter", messages=[USER], tools=[tool])
    (call,) = parsed.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(**ARGUMENTS)
    assert scripted.llm.asked[0].params.structural_tag is not None


@pytest.mark.covering
@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
def test_a_random_model_that_must_call_calls(random: Live, choice: Any, stream: bool) -> None:
    with client(random) as asks:
        for seed in range(2):
            fields: dict[str, Any] = {
                "model": "random",
                "messages": [USER],
                "tools": [TOOL],
                "tool_choice": choice,
                "seed": seed,
                "parallel_tool_calls": False,
            }
            if stream:
                with asks.chat.completions.stream(**fields) as pieces:
                    got = pieces.get_final_completion().choices[0]
            else:
                got = asks.chat.completions.create(**fields).choices[0]
            (call,) = got.message.tool_calls
            assert got.finish_reason == "tool_calls"
            assert got.message.content is None
            check_arguments(json.loads(call.function.arguments))


def test_a_schema_that_cannot_be_enforced_is_refused_by_name(random: Live) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "contains": {"const": 1}}}}
    tool = {"type": "function", "function": WEATHER | {"parameters": parameters}}
    words = r"contains at #/properties/a.*get_weather"
    with client(random) as asks, pytest.raises(openai.BadRequestError, match=words):
        asks.chat.completions.create(model="random", messages=[USER], tools=[tool], tool_choice="required")


@pytest.mark.slow
@needs_real_model
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_real_model_that_must_call_calls(real: Live, choice: Any) -> None:
    with client(real) as asks:
        fields: dict[str, Any] = {"model": "real", "tools": [TOOL], "max_tokens": 100, "temperature": 0}
        said: list[Any] = [USER]
        fields["parallel_tool_calls"] = False
        whole = asks.chat.completions.create(messages=said, tool_choice=choice, **fields).choices[0]
        with asks.chat.completions.stream(messages=said, tool_choice=choice, **fields) as pieces:
            streamed = pieces.get_final_completion().choices[0]
        for got in (whole, streamed):
            assert got.finish_reason == "tool_calls"
            check_arguments(json.loads(got.message.tool_calls[0].function.arguments))
        said += [whole.message, {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "sunny"}]
        assert asks.chat.completions.create(messages=said, **fields).choices[0].message.content
