"""LiteLLM's client, in an environment of its own: it needs an older openai than the newest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.models import needs_real_model
from tests.helpers.server.live import Live, live
from tests.helpers.server.scripted import ScriptedLLM
from tests.helpers.server.tools_model import (
    ARGUMENTS,
    CALL,
    QUESTION,
    TOOL,
    check_arguments,
    random_engine,
    real_engine,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own
USER: dict[str, Any] = {"role": "user", "content": QUESTION}


@pytest.fixture(scope="module")
def litellm() -> Any:
    reason = "needs LiteLLM, which downgrades openai: pip install litellm, in an environment of its own"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network for prices
        return pytest.importorskip("litellm", reason=reason)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Live]:
    with live(lambda: ScriptedLLM("")) as running:
        yield running


def ask(litellm: Any, server: Live, said: list[Any], **more: Any) -> Any:
    return litellm.completion(
        model=f"openai/{server.llm.model_name}",
        api_base=f"{server.url}/v1",
        api_key="none",
        messages=said,
        tools=[TOOL],
        num_retries=0,
        **more,
    )


def test_turns_with_tools_whole(litellm: Any, scripted: Live) -> None:
    scripted.llm.says(f"One moment. {CALL}", "Sunny.", "You are welcome.")
    said: list[Any] = [USER]
    first = ask(litellm, scripted, said).choices[0]
    (call,) = first.message.tool_calls
    assert (first.finish_reason, json.loads(call.function.arguments)) == ("tool_calls", ARGUMENTS)
    said += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    said += [ask(litellm, scripted, said).choices[0].message.model_dump(), {"role": "user", "content": "Thank you"}]
    assert ask(litellm, scripted, said).choices[0].message.content == "You are welcome."
    assert f"One moment.{CALL}" in scripted.llm.prompt()


def test_turns_with_tools_streamed(litellm: Any, scripted: Live) -> None:
    scripted.llm.says(CALL, "Sunny.")
    pieces = list(ask(litellm, scripted, [USER], stream=True))
    message = litellm.stream_chunk_builder(pieces, messages=[USER]).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    said = [USER, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    parts = [piece.choices[0].delta.content or "" for piece in ask(litellm, scripted, said, stream=True)]
    assert "".join(parts) == "Sunny."


@pytest.mark.parametrize("stream", [False, True])
def test_a_random_model_that_must_call_calls(litellm: Any, stream: bool) -> None:
    pytest.importorskip("xgrammar", reason="the extra is not installed: pip install 'millpond[constrained]'")
    with live(random_engine) as server:
        found = ask(litellm, server, [USER], tool_choice="required", seed=1, parallel_tool_calls=False, stream=stream)
        found = litellm.stream_chunk_builder(list(found), messages=[USER]) if stream else found
        check_arguments(json.loads(found.choices[0].message.tool_calls[0].function.arguments))


@pytest.mark.slow
@needs_real_model
def test_a_real_model_that_must_call_calls(litellm: Any) -> None:
    with live(real_engine) as server:
        found = ask(litellm, server, [USER], tool_choice="required", max_tokens=100, temperature=0)
        check_arguments(json.loads(found.choices[0].message.tool_calls[0].function.arguments))
