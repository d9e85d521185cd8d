"""Regular expressions and grammars of clients: what is refused before anything is compiled, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.engine.grammar.compiler import _spec
from millpond.engine.grammar.patterns import check_grammar, check_pattern
from millpond.errors import OptionError


@pytest.mark.parametrize(
    "pattern",
    [
        "a{10000}",
        "a{2,}",
        "(a{100}){100}",
        "([a-z]{1,63}[.]){1,127}",
        "[{9999999}]",
        r"\{99999\}",
        "a{0010}",
        "(a{500}b){3}c{10000}",
        "a{0,5}",
        "((ab{2}){2}){2}",
    ],
)
def test_what_can_be_enforced(pattern: str) -> None:
    check_pattern(pattern, "regex")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a{99999999999}", "{99999999999} repeats more than 10,000 times"),
        ("a{4294967297}", "{4294967297} repeats more than 10,000 times"),  # in 32 bits it is 1
        ("a{1,10001}", "{1,10001} repeats more"),
        ("x|[ab]{10001,}", "{10001,} repeats more"),
        ("a{" + "9" * 1900 + "}", "repeats more than 10,000 times"),
        ("(a{1000}){1001}", "1,001,000 times together"),
        ("((a{999}b){999}c?){9}", "8,982,009 times together"),
        ("a{3,2}", "at least 3 times and at most 2"),
        ("a{٣٣٣٣٣٣}", "repeats more"),
    ],
)
def test_repetitions_are_bounded(pattern: str, words: str) -> None:
    with pytest.raises(OptionError) as found:
        check_pattern(pattern, "regex")
    assert words in str(found.value)
    assert len(str(found.value)) < 200


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "{99999999}" [{99999}] # {999999}',
        "root ::= '{99999999}' x{2, 3}",
        r'root ::= "\"{99999}" | "a"{5,}',
        'root ::= ("a"{100} "b"){ 100 }',
    ],
)
def test_grammars_that_can_be_enforced(grammar: str) -> None:
    check_grammar(grammar, "grammar")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (("grammar", 'root ::= "a"{99999999999}'), "grammar: {99999999999} repeats more than 10,000 times"),
        (("grammar", 'root ::= ("a"{1000} "b"){ 1001 }'), "together"),
        (("regex", "a{99999999999}"), "regex: {99999999999} repeats"),
        (("json_schema", {"type": "string", "pattern": "a{99999999999}"}), "repeats more than 10,000 times"),
        (("structural_tag", {"type": "regex", "pattern": "a{99999999999}"}), "structural_tag: pattern: {99999999999}"),
        (
            ("structural_tag", {"type": "tag", "begin": "<", "content": {"type": "grammar", "grammar": "a{20000}"}}),
            "structural_tag: grammar: {20000}",
        ),
        (
            ("structural_tag", {"type": "repeat", "min": 0, "max": 2**40, "content": {}}),
            "max=1099511627776 must be 0 to",
        ),
        (("structural_tag", {"type": "any_text", "max_chars": 2**31 - 1}), "structural_tag: max_chars=2147483647"),
        (("structural_tag", {"type": "qwen_xml_parameter", "json_schema": {"contains": {}}}), "contains"),
    ],
)
def test_nothing_is_compiled_of_them(params: tuple[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as found:
        _spec(*params)
    assert words in str(found.value)
