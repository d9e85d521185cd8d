"""Calls of tools are read out of a text as Hermes, Llama 3 and Mistral write them, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.server.tools.formats import HermesReader, Llama3Reader, MistralReader
from millpond.server.tools.reader import Arguments, CallBegins, CallBreaks, CallEnds, Content, Event, Reader, found_in
from tests.helpers.examples import examples

NAMES = {"f", "get_weather"}
#: Format, text, content, calls.
WRITTEN: list[tuple[type[Reader], str, str, list[tuple[str, str]]]] = [
    (HermesReader, "Hi <b>", "Hi <b>", []),
    (HermesReader, " Hi \n", " Hi \n", []),
    (HermesReader, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (HermesReader, 'Wait.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n', "Wait.", [("f", "{}")]),
    (
        HermesReader,
        '<tool_call>{"arguments":{"x":[1,{"y":null}]},"name":"f"}</tool_call>',
        "",
        [("f", '{"x":[1,{"y":null}]}')],
    ),
    (HermesReader, '<tool_call>{"name":"f","arguments":"{\\"a\\": 2}"}</tool_call>', "", [("f", '{"a": 2}')]),
    (
        HermesReader,
        '<tool_call>{"name":"f","parameters":{"a":"}</tool_call>"}}</tool_call>',
        "",
        [("f", '{"a":"}</tool_call>"}')],
    ),
    (
        HermesReader,
        '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"get_weather",'
        '"arguments":{"city":"\\u00fc \\"A\\""}}',
        "",
        [("f", "{}"), ("get_weather", '{"city":"\\u00fc \\"A\\""}')],
    ),
    (HermesReader, '<tool_call>{"name":"f","arguments":{"a":-1.5e3}}</tool_', "", [("f", '{"a":-1.5e3}')]),
    (HermesReader, '{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        HermesReader,
        ' \n{"arguments": {"a": 1}, "name": "f"}\n{"name":"get_weather","arguments":{}} ',
        "",
        [("f", '{"a": 1}'), ("get_weather", "{}")],
    ),
    (HermesReader, '```json\n{\n  "name": "f",\n  "arguments": {"a": "`"}\n}\n```', "", [("f", '{"a": "`"}')]),
    (
        HermesReader,
        '```\n[{"name":"f","arguments":{}},\n{"name":"f","arguments":{"a":2}}]\n```\n',
        "",
        [("f", "{}"), ("f", '{"a":2}')],
    ),
    (
        HermesReader,
        '```json\n{"name":"f","arguments":{}}\n{"name":"f","arguments":{"a":2}}\n```\n\n'
        '```json\n{"name":"get_weather","arguments":{}}\n```\nThat is all.',
        "That is all.",
        [("f", "{}"), ("f", '{"a":2}'), ("get_weather", "{}")],
    ),
    (
        HermesReader,
        '{"name":"f","arguments":{}}\n<tool_call>{"name":"f","arguments":{"a":2}}</tool_call>',
        "",
        [("f", "{}"), ("f", '{"a":2}')],
    ),
    (HermesReader, '```json\n{"name":"f","arguments":{}}', "", [("f", "{}")]),
    (HermesReader, 'So: {"name":"f","arguments":{}}', 'So: {"name":"f","arguments":{}}', []),
    (HermesReader, 'A\n```json\n{"name":"f","arguments":{}}\n```', 'A\n```json\n{"name":"f","arguments":{}}\n```', []),
    (Llama3Reader, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (Llama3Reader, ' <|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        Llama3Reader,
        '{"name":"f","parameters":{}}; {"name":"get_weather","parameters":{"city":"Bern"}}',
        "",
        [("f", "{}"), ("get_weather", '{"city":"Bern"}')],
    ),
    (Llama3Reader, 'Now:<|python_tag|>{"name":"f","parameters":{}}', "Now:", [("f", "{}")]),
    (Llama3Reader, 'See {"name":"f","parameters":{}}', 'See {"name":"f","parameters":{}}', []),
    (Llama3Reader, "<|python_tag|>f.call(a=1)", "<|python_tag|>f.call(a=1)", []),
    (Llama3Reader, '{"answer": 42}', '{"answer": 42}', []),
    (MistralReader, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    (
        MistralReader,
        'So:[TOOL_CALLS][{"name":"f","arguments":{}}, {"name":"get_weather","arguments":{}}]',
        "So:",
        [("f", "{}"), ("get_weather", "{}")],
    ),
    (
        MistralReader,
        '[TOOL_CALLS]f[ARGS]{"a": true}[TOOL_CALLS]get_weather{"city":"x"}',
        "",
        [("f", '{"a": true}'), ("get_weather", '{"city":"x"}')],
    ),
    (MistralReader, "[1] is [TOOL", "[1] is [TOOL", []),
]

#: What is no call, and stays in the content as it is.
MALFORMED = [
    (HermesReader, '```json\n{"name":"nobody","arguments":{}}\n```'),
    (HermesReader, '{"name": "Ada", "age": 36}'),
    (HermesReader, '[{"name": "nobody", "arguments": {}}]'),
    (HermesReader, '["f", {"a": 1}]'),
    (HermesReader, "```\n```"),
    (HermesReader, '```python\n{"name":"f","arguments":{}}\n```'),
    (HermesReader, '```json\n{"name":"f","arguments":{"a": x}}\n```'),
    (HermesReader, '<tool_call>{"name":"nobody","arguments":{}}</tool_call>'),
    (HermesReader, '<tool_call>{"name":"f","arguments":{"a": 01}}</tool_call>'),
    (HermesReader, '<tool_call>{"name":"f","arguments":{"a": 1,}}</tool_call>'),
    (HermesReader, '<tool_call>{"name":"f","arguments":[1]}</tool_call>'),
    (HermesReader, '<tool_call>{"name":"f","arguments":"[1]"}</tool_call>'),
    (HermesReader, '<tool_call>{"name":"f","arguments":{"a":NaN}}</tool_call>'),
    (HermesReader, '<tool_call>{"name":"f","arguments":{"a":"x\ny"}}</tool_call>'),
    (HermesReader, '<tool_call>{"name":"f"}</tool_call>'),
    (HermesReader, '<tool_call>{"name":"f","arguments":{},"parameters":{}}</tool_call>'),
    (HermesReader, '<tool_call>{"name":"f","arguments":{"a":"cut'),
    (HermesReader, '<tool_call>{"na'),
    (HermesReader, "<tool_call><function=f></function></tool_call>"),
    (HermesReader, '<tool_call>{"name":"f","arguments":{"a":' + "[" * 100 + "]" * 100 + "}}</tool_call>"),
    (Llama3Reader, '{"name":"nobody","parameters":{}}'),
    (Llama3Reader, '{"name":"f","parameters":{"a"'),
    (Llama3Reader, '{"name":"f","parameters":{"a":tru}}'),
    (MistralReader, '[TOOL_CALLS] [{"name":"nobody","arguments":{}}]'),
    (MistralReader, "[TOOL_CALLS]nobody[ARGS]{}"),
    (MistralReader, "[TOOL_CALLS]f[ARGS]{1}"),
]
FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    '{"name": "f", "arguments": ',
    "{",
    "}",
    '{"name": "get_weather", "parameters": ',
    '{"a": 1}',
    '{"b": [1.5, "x\\n"]}',
    "[",
    "]",
    ", ",
    "; ",
    "f",
    " ",
    "\n",
    "Hello ",
    "```json\n",
    "```",
    '"',
    "\\",
    "<",
    "-1",
    "e",
    "null",
    ":",
    '{"arguments": {}, "name": "f"}',
    "nobody",
]


def read(kind: type[Reader], parts: list[str], **more: Any) -> list[Event]:
    reader = kind(NAMES, **more)
    return [*(event for part in parts for event in reader.add(part)), *reader.finish()]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), WRITTEN)
def test_calls_are_found(kind: type[Reader], text: str, content: str, calls: list[tuple[str, str]]) -> None:
    found = found_in(read(kind, [text]))
    assert (found.content, found.calls) == (content, calls)


@pytest.mark.parametrize(("kind", "text"), MALFORMED)
def test_a_malformed_call_is_content(kind: type[Reader], text: str) -> None:
    for whole in (text, f"{text} and on"):
        found = found_in(read(kind, [whole]))
        assert (found.content, found.calls) == (whole, [])


@pytest.mark.parametrize("kind", [HermesReader, MistralReader])
def test_after_a_malformed_call_the_next_one_is_read(kind: type[Reader]) -> None:
    mark = "<tool_call>" if kind is HermesReader else "[TOOL_CALLS] ["
    good = f'{mark}{{"name": "f", "arguments": {{"a": 1}}}}'
    for bad in (mark, mark[:-3], f'{mark}{{"name": "f", "arguments": {{"a": x', f'{mark}{{"name": "g"', f"{mark}{{"):
        assert found_in(read(kind, [bad + good])).calls == [("f", '{"a": 1}')]


@pytest.mark.parametrize(("kind", "text"), [row[:2] for row in WRITTEN] + MALFORMED)
def test_every_cut_in_two_gives_the_same(kind: type[Reader], text: str) -> None:
    whole = found_in(read(kind, [text]))
    for place in range(len(text) + 1):
        assert found_in(read(kind, [text[:place], text[place:]])) == whole
    assert found_in(read(kind, list(text))) == whole


@given(
    st.sampled_from([HermesReader, Llama3Reader, MistralReader]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=16),
    st.lists(st.integers(1, 9), min_size=1),
    st.integers(1, 3),
)
@settings(max_examples=examples(300))
def test_it_cannot_matter_how_a_text_is_cut(
    kind: type[Reader], fragments: list[str], lengths: list[int], most: int
) -> None:
    text, parts, place = "".join(fragments), [], 0
    while place < len(text):
        parts.append(text[place : place + lengths[len(parts) % len(lengths)]])
        place += len(parts[-1])
    events = read(kind, parts, most=most)
    found = found_in(events)
    assert found == found_in(read(kind, [text], most=most))
    assert len(found.calls) <= most
    for name, arguments in found.calls:
        assert name in NAMES
        assert isinstance(json.loads(arguments), dict)
    if not found.calls:
        assert found.content == text
    open_call = False
    for event in events:  # begins, arguments and ends stand in order
        if isinstance(event, CallBegins | Content):
            assert not open_call
        open_call = isinstance(event, CallBegins) or (open_call and not isinstance(event, CallEnds | CallBreaks))
    assert not open_call


def test_text_is_passed_on_as_soon_as_it_can_be_none_of_a_call() -> None:
    reader = HermesReader(NAMES)
    assert reader.add("Hello <") == [Content("Hello")]
    assert reader.add("tool") == []
    assert reader.add("s> x") == [Content(" <tools> x")]
    assert reader.add("\n<tool_call>") == []
    assert reader.add('\n{"name": "f", "arg') == []
    assert reader.add('uments": {"a"') == [CallBegins("f"), Arguments('{"a"')]
    assert reader.add(": 1") == [Arguments(": 1")]
    assert reader.add("}}\n</tool_") == [Arguments("}"), CallEnds()]
    assert reader.add("call>") == reader.finish() == []


def test_a_call_without_a_mark_is_passed_on_as_it_comes() -> None:
    reader = HermesReader(NAMES)
    assert reader.add('```json\n{"name": "f", "arg') == []
    assert reader.add('uments": {"a"') == [CallBegins("f"), Arguments('{"a"')]
    assert reader.add(": 1}}\n``") == [Arguments(": 1}"), CallEnds()]
    assert reader.add("`") == reader.finish() == []


def test_where_answers_are_held_to_a_grammar_only_its_calls_are_read() -> None:
    text = '{"name": "f", "arguments": {"a": 1}}'
    assert found_in(read(HermesReader, [text], unmarked=False)).content == text


def test_a_call_that_breaks_off_is_said_to_be_none() -> None:
    reader = HermesReader(NAMES)
    assert reader.add(' <tool_call>{"name": "f", "arguments": {"a"') == [CallBegins("f"), Arguments('{"a"')]
    text = ' <tool_call>{"name": "f", "arguments": {"a"'
    assert reader.add("x") == [CallBreaks(text), Content("x")]
    assert HermesReader(NAMES).finish() == []


@pytest.mark.parametrize("kind", [HermesReader, Llama3Reader, MistralReader])
def test_beyond_the_last_call_that_is_taken_nothing_is(kind: type[Reader]) -> None:
    texts = {
        HermesReader: '<tool_call>{"name":"f","arguments":{}}</tool_call>',
        Llama3Reader: '{"name":"f","parameters":{}};',
        MistralReader: "[TOOL_CALLS]f[ARGS]{}",
    }
    found = found_in(read(kind, [texts[kind] * 3], most=2))
    assert (found.content, len(found.calls)) == ("", 2)


@pytest.mark.parametrize(
    "text",
    [
        "<" * 100_000,
        "<tool_call>" * 10_000,
        '<tool_call>{"name":"f","arguments":{"a":"' + "x" * 100_000,
        '<tool_call>{"name":"f","arguments":{' * 3_000,
        "\n" * 100_000,
        '<tool_call>{"' * 10_000,
        "```json\n" * 10_000,
        "[" * 100_000,
        '{"name":"f","arguments":' + '{"a":' * 20_000,
    ],
)
def test_the_time_grows_with_the_length_alone(text: str) -> None:
    """Each of these would take minutes, were anything read again and again."""
    assert found_in(read(HermesReader, [text])).content == text
