"""A chat template is asked once how it shows tools and calls; messages are then given to it in the form it expects."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from millpond.errors import OptionError
from millpond.server.app import create_app
from millpond.server.schemas import ChatBody
from millpond.server.settings import ServerSettings
from millpond.server.tools.formats import Mistral
from millpond.server.tools.template import Shown, ask_template, in_words
from millpond.server.tools.tool_choice import format_of
from tests.engine.test_constraint import byte_tokenizer
from tests.helpers.server.fake import FakeLLM

#: As the templates of the families write, in short.
_SAID = "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}"
_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
_END = "|{% endfor %}"
_OBJECT = '{"name": "{{ call.function.name }}", "%s": {{ call.function.arguments | tojson }}}'
TEMPLATES = {
    "hermes": _TOOLS
    + _SAID
    + "{% for call in message.tool_calls %}\n<tool_call>\n"
    + _OBJECT % "arguments"
    + "\n</tool_call>{% endfor %}"
    + _END,
    "hermes, arguments first": _TOOLS + _SAID + '{% for call in message.tool_calls %}<tool_call>\n{ "arguments": '
    '{{ call.function.arguments | tojson }}, "name": "{{ call.function.name }}"}\n</tool_call>{% endfor %}' + _END,
    "llama3": _TOOLS + _SAID + "{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% for call in message.tool_calls %}"
    + _OBJECT % "parameters"
    + "{% endfor %}{% endif %}"
    + _END,
    "mistral": "{% for message in messages %}{% if loop.last and tools %}[TOOLS]{{ tools | tojson }}{% endif %}"
    "{{ message['content'] }}{% if message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ call.function | tojson }}{% endfor %}]"
    "{% endif %}" + _END,
    "mistral, named": _TOOLS + _SAID + "{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}" + _END,
    "text": _TOOLS + _SAID + "{% for call in message.tool_calls %}{{ '<call>' + call.function.name + '(' + "
    "call.function.arguments + ')' }}{% endfor %}" + _END,
    "xml": _TOOLS + _SAID + "{% for call in message.tool_calls %}<tool_call><function={{ call.function.name }}>"
    "{% for name, value in call.function.arguments | items %}<{{ name }}>{{ value }}{% endfor %}</tool_call>"
    "{% endfor %}" + _END,
    "names": _TOOLS + _SAID + "{% if message.role == 'tool' %}{{ message.name }}{% endif %}" + _END,
    "chatml": _SAID + _END,
    "no roles but two": _SAID + "{% if message.role not in ('user', 'assistant') %}{{ raise_exception('no') }}"
    "{% endif %}" + _END,
}
WEATHER = {"type": "function", "function": {"name": "get_weather"}}
CALLS: list[Any] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
]


def of(name: str) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def rendered(name: str, messages: list[Any] = CALLS, **fields: Any) -> str:
    """What the model reads."""
    llm = FakeLLM(tokenizer=of(name))
    body = ChatBody(messages=messages, **fields)
    tokens = create_app(llm).state.service.tokens
    text, _ = asyncio.run(tokens.chat(body.messages, body))
    return str(text)


@pytest.mark.parametrize(
    ("name", "expected", "many"),
    [
        ("hermes", "hermes", True),
        ("hermes, arguments first", "hermes", True),
        ("llama3", "llama3", False),
        ("mistral", "mistral", True),
        ("mistral, named", "mistral", True),
        ("text", None, True),
        ("xml", None, True),
        ("chatml", "hermes", True),
        ("no roles but two", "hermes", True),
    ],
)
def test_the_format_is_that_of_the_template(name: str, expected: str | None, many: bool) -> None:
    shown = ask_template(of(name))
    found = format_of("auto", shown)
    assert (None if found is None else found.name, shown.many) == (expected, many)
    assert shown.tools == (name not in ("chatml", "no roles but two"))
    if expected == "mistral":
        assert found == format_of("mistral", shown) == Mistral(named=name == "mistral, named")


def test_the_operator_may_say_another_format() -> None:
    shown = ask_template(of("hermes"))
    assert format_of("none", shown) is None
    assert getattr(format_of("llama3", shown), "name", "") == "llama3"
    with pytest.raises(OptionError, match="unknown tool_parser 'herms'; did you mean 'hermes'"):
        create_app(FakeLLM(), ServerSettings(tool_parser="herms"))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", '{"name": "get_weather", "arguments": {"city": "Bern"}}'),
        ("llama3", '{"name": "get_weather", "parameters": {"city": "Bern"}}'),
        ("mistral, named", '[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}'),
        ("text", '<call>get_weather({"city": "Bern"})'),
        ("xml", "<function=get_weather><city>Bern"),
        ("chatml", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'),
    ],
)
def test_arguments_have_the_form_that_the_template_expects(name: str, written: str) -> None:
    assert written in rendered(name, tools=[WEATHER])


def test_results_have_the_name_of_the_tool_and_tools_all_that_templates_look_for() -> None:
    text = rendered("names", tools=[WEATHER])
    assert text.endswith("tool:sunnyget_weather|")
    shown = json.loads(text.splitlines()[0])
    assert shown["function"] == {
        "name": "get_weather",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }


@pytest.mark.parametrize("name", ["chatml", "no roles but two"])
def test_where_the_template_shows_no_tools_the_server_writes_them(name: str) -> None:
    text = rendered(name, tools=[WEATHER])
    assert text.startswith("user:These tools can be called:\n{")
    assert '"get_weather"' in text
    assert "<tool_response>\nsunny\n</tool_response>" in text
    assert rendered(name, CALLS[:1]) == "user:Hi|"


def test_words_leave_the_messages_that_came_as_they_are() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    before = copy.deepcopy(messages)
    system, user, results = in_words(messages, [WEATHER])
    assert messages == before
    assert system["content"].endswith("Be brief.")
    assert user == messages[1]
    assert results["role"] == "user"
    assert results["content"] == "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert in_words([], [WEATHER])[0]["role"] == "system"


def test_a_tokenizer_without_a_template_shows_nothing() -> None:
    assert ask_template(byte_tokenizer()) == ask_template(None) == Shown()
