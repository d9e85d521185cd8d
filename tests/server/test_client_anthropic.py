"""Anthropic's own client: turns, streams, tools, errors; a scripted engine, a random model and a real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.models import needs_real_model
from tests.helpers.server.live import Live, live
from tests.helpers.server.scripted import ScriptedLLM
from tests.helpers.server.tools_model import ARGUMENTS, CALL, QUESTION, WEATHER, check_arguments
from tests.helpers.server.tools_model import random as random  # the fixtures
from tests.helpers.server.tools_model import real as real

anthropic = pytest.importorskip("anthropic", reason="needs Anthropic's client: pip install anthropic")

TOOL: dict[str, Any] = {
    "name": WEATHER["name"],
    "description": WEATHER["description"],
    "input_schema": WEATHER["parameters"],
}
USER: dict[str, Any] = {"role": "user", "content": QUESTION}
#: What coding agents send besides: instructions in blocks with marks, a long answer at most, thoughts.
AGENT: dict[str, Any] = {
    "max_tokens": 20_000,
    "thinking": {"type": "enabled", "budget_tokens": 19_999},
    "metadata": {"user_id": "someone"},
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Rules: " + "be brief. " * 500, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [TOOL, *({**TOOL, "name": f"tool_{number}"} for number in range(60))],
}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Live]:
    with live(lambda: ScriptedLLM(""), api_keys=("secret",)) as running:
        yield running


def client(server: Live, key: str = "secret") -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def ask(asks: Any, said: list[Any], streamed: bool, **fields: Any) -> Any:
    fields = {"model": "fake/counter", "max_tokens": 1_000, "messages": said} | fields
    if not streamed:
        return asks.messages.create(**fields)
    with asks.messages.stream(**fields) as stream:
        assert [event.type for event in stream][-1] == "message_stop"
        return stream.get_final_message()


def results(answer: Any) -> list[dict[str, Any]]:
    return [
        {"type": "tool_result", "tool_use_id": one.id, "content": "sunny"}
        for one in answer.content
        if one.type == "tool_use"
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_s_turns(scripted: Live, streamed: bool) -> None:
    """Calls at the same time, whose results come back in one message, with words behind them."""
    scripted.llm.says(f"One moment. {CALL}\n{CALL}", f"```json\n{CALL[12:-13]}\n```", "Sunny.")
    said: list[Any] = [USER]
    with client(scripted) as asks:
        for calls, reason in ((2, "tool_use"), (1, "tool_use"), (0, "end_turn")):
            answer = ask(asks, said, streamed, **AGENT)
            told = results(answer)
            assert (len(told), answer.stop_reason) == (calls, reason)
            assert all(one.input == ARGUMENTS for one in answer.content if one.type == "tool_use")
            said.append({"role": "assistant", "content": answer.content})
            said.append({"role": "user", "content": [*told, {"type": "text", "text": "Go on."}]})
    assert answer.content[0].text == "Sunny."
    prompt = scripted.llm.prompt()
    assert f"assistant: One moment.{CALL}{CALL}tool: sunnytool: sunnyuser: Go on." in prompt.replace("\n\n", "\n")
    assert "You are an agent.\nRules: be brief." in prompt
    assert "tool_59" in prompt


def test_numbers_and_ids(scripted: Live) -> None:
    scripted.llm.says("Hello")
    with client(scripted) as asks:
        whole, streamed = (ask(asks, [USER], streamed) for streamed in (False, True))
        counted = asks.messages.count_tokens(model="fake/counter", messages=[USER], system="x", tools=[TOOL])
        read = ask(asks, [USER], False, system="x", tools=[TOOL]).usage
        raw = asks.messages.with_raw_response.create(model="fake/counter", max_tokens=5, messages=[USER])
    assert whole.usage.input_tokens == streamed.usage.input_tokens > 0
    assert whole.usage.cache_read_input_tokens == streamed.usage.cache_read_input_tokens == 3
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 2
    assert counted.input_tokens == read.input_tokens + read.cache_read_input_tokens
    assert whole._request_id.startswith("req_")
    assert whole._request_id != raw.headers["request-id"]


def test_the_model_is_listed(scripted: Live) -> None:
    with client(scripted) as asks:
        (model,) = list(asks.models.list())
        assert (model.id, model.type, model.display_name) == ("fake/counter", "model", "fake/counter")
        assert model.created_at.tzinfo is not None
        assert asks.models.retrieve("fake/counter").id == model.id


def test_errors_are_those_of_the_client(scripted: Live) -> None:
    scripted.llm.says("Hello")
    with client(scripted, "wrong") as asks, pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        ask(asks, [USER], False)
    with client(scripted) as asks:
        with pytest.raises(anthropic.NotFoundError, match="this server has"):
            ask(asks, [USER], True, model="claude")
        image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match="a block of type 'image'") as error:
            ask(asks, [{"role": "user", "content": [image]}], False)
        assert error.value.request_id == error.value.body["request_id"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_random_model_that_must_call_calls(random: Live, streamed: bool) -> None:
    with client(random) as asks:
        choice = {"type": "any", "disable_parallel_tool_use": True}
        answer = ask(asks, [USER], streamed, model="random", tools=[TOOL], tool_choice=choice)
    (call,) = answer.content
    assert answer.stop_reason == "tool_use"
    check_arguments(call.input)


@pytest.mark.slow
@needs_real_model
@pytest.mark.parametrize("streamed", [False, True])
def test_a_real_model_reads_what_a_tool_says(real: Live, streamed: bool) -> None:
    with client(real) as asks:
        said: list[Any] = [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "call_1", "name": "get_weather", "input": ARGUMENTS}],
            },
        ]
        said.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}]})
        fields: dict[str, Any] = {"model": "real", "max_tokens": 40, "tools": [TOOL], "extra_body": {"temperature": 0}}
        answer = ask(asks, said, streamed, **fields)
    assert answer.content
    assert answer.usage.input_tokens > 50
