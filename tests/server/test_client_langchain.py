"""LangChain's client for OpenAI's interface: several turns, streams, tools and structured answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.helpers.models import needs_real_model
from tests.helpers.server.live import Live, live
from tests.helpers.server.scripted import ScriptedLLM
from tests.helpers.server.tools_model import ARGUMENTS, CALL, QUESTION, TOOL, random_engine, real_engine

langchain = pytest.importorskip("langchain_openai", reason="needs LangChain's client: pip install langchain-openai")
messages = pytest.importorskip("langchain_core.messages", reason="comes with langchain-openai")


class get_weather(BaseModel):  # the name that the model reads
    """The weather in a city."""

    city: str = Field(max_length=12)
    unit: str = Field(pattern="^(celsius|fahrenheit)$")


@pytest.fixture(scope="module")
def scripted() -> Iterator[Live]:
    with live(lambda: ScriptedLLM("")) as running:
        yield running


def chat(server: Live, **more: Any) -> Any:
    return langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=server.llm.model_name, max_retries=0, **more
    )


def test_turns_with_tools_whole(scripted: Live) -> None:
    scripted.llm.says(f"One moment. {CALL}", "Sunny.", "You are welcome.")
    asks = chat(scripted).bind_tools([TOOL])
    said: list[Any] = [messages.HumanMessage(QUESTION)]
    said.append(asks.invoke(said))
    (call,) = said[-1].tool_calls
    assert (call["name"], call["args"], said[-1].content) == ("get_weather", ARGUMENTS, "One moment.")
    said.append(messages.ToolMessage("sunny", tool_call_id=call["id"]))
    said.append(asks.invoke(said))
    said.append(messages.HumanMessage("Thank you"))
    assert asks.invoke(said).content == "You are welcome."
    assert f"One moment.{CALL}" in scripted.llm.prompt()


def test_turns_with_tools_streamed(scripted: Live) -> None:
    scripted.llm.says(CALL, "Sunny.")
    asks = chat(scripted, stream_usage=True).bind_tools([TOOL], parallel_tool_calls=False)
    said: list[Any] = [messages.HumanMessage(QUESTION)]
    pieces = list(asks.stream(said))
    assert len(pieces) > 5
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", ARGUMENTS)
    assert whole.usage_metadata["output_tokens"] > 0
    said += [whole, messages.ToolMessage("sunny", tool_call_id=call["id"])]
    assert "".join(piece.content for piece in asks.stream(said)) == "Sunny."
    assert f"{CALL}" in scripted.llm.prompt()


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_structured_answers(scripted: Live, method: str) -> None:
    scripted.llm.says(CALL if method == "function_calling" else '{"city": "Bern", "unit": "celsius"}')
    found = chat(scripted).with_structured_output(get_weather, method=method).invoke(QUESTION)
    assert found == get_weather(**ARGUMENTS)
    params = scripted.llm.asked[0].params
    assert (params.structural_tag is not None, params.json_schema is not None) == (
        method == "function_calling",
        method != "function_calling",
    )


@pytest.mark.parametrize("choice", ["any", "get_weather", True])
def test_a_random_model_that_must_call_calls(choice: Any) -> None:
    pytest.importorskip("xgrammar", reason="the extra is not installed: pip install 'millpond[constrained]'")
    with live(random_engine) as server:
        found = chat(server, seed=1).bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
        get_weather(**found.invoke(QUESTION).tool_calls[0]["args"])


@pytest.mark.slow
@needs_real_model
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_a_real_model_gives_structured_answers(method: str) -> None:
    with live(real_engine) as server:
        asks = chat(server, temperature=0, max_tokens=100).with_structured_output(get_weather, method=method)
        assert isinstance(asks.invoke(QUESTION), get_weather)
