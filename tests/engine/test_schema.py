"""JSON schemas: what is enforced, what is refused by name, and what is too large."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
import pytest

from millpond.engine.grammar.patterns import check_pattern
from millpond.engine.grammar.schema import MAX_BYTES, MAX_DEPTH, MAX_SCHEMAS, MAX_VALUES, enforceable
from millpond.errors import OptionError
from tests.engine.test_constraint import byte_tokenizer

INT: dict[str, Any] = {"type": "integer"}
NULL: dict[str, Any] = {"type": "null"}


def one_of(*kinds: str) -> dict[str, Any]:
    def part(kind: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": kind}, "n": INT}, "required": ["kind"]}

    return {"oneOf": [part(kind) for kind in kinds]}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": INT}, "contains"),
        ({"type": "array", "items": [INT], "additionalItems": False}, "additionalItems"),
        ({"not": INT}, "not"),
        ({"type": "integer", "not": {"const": 1}}, "not"),
        ({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 7}}, "if"),
        ({"$ref": "https://example.org/schema.json"}, "$ref"),
        ({"$ref": "#anchor"}, "$ref"),
        ({"$ref": "#/properties/missing"}, "$ref"),
        ({"$defs": {"x": INT}, "$ref": "#/$defs/x", "minimum": 5}, "minimum"),
        ({"$dynamicRef": "#x"}, "$dynamicRef"),
        ({"allOf": [INT, {"minimum": 5}]}, "allOf"),
        ({"type": "integer", "allOf": [{"minimum": 5}]}, "type"),
        ({"type": "integer", "anyOf": [{"minimum": 3}]}, "type"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf"),
        (one_of("a", "b", "a"), "oneOf"),
        ({"type": "string", "enum": ["a", 1]}, "enum"),
        ({"const": 5, "minimum": 3}, "minimum"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "integer", "multipleOf": 2_000}, "multipleOf"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "maxLength"),
        ({"type": "string", "format": "email", "minLength": 3}, "minLength"),
        ({"type": "string", "format": "regex"}, "format"),
        ({"type": "string", "format": "json-pointer"}, "format"),
        ({"type": "string", "pattern": "^(?=a)a"}, "pattern"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
        ({"type": "object", "dependentSchemas": {"a": {}}}, "dependentSchemas"),
        ({"type": "object", "properties": {"aa": {}}, "propertyNames": {"maxLength": 1}}, "propertyNames"),
        ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^a": INT}}, "patternProperties"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "properties": {"a": {"type": "string", "nullable": True}}}, "nullable"),
        ({"type": "integer", "minimun": 3}, "minimun"),
        ({"minimum": 3, "maxLength": 2}, "type"),
        ({"type": "object", "properties": {"a": {"contains": {}}}}, "contains"),
        ({"$defs": {"unused": {"not": {}}}, "type": "null"}, "not"),
    ],
)
def test_a_keyword_that_is_not_enforced_is_refused_by_name(schema: Any, keyword: str) -> None:
    with pytest.raises(OptionError) as refused:
        enforceable(schema)
    assert keyword in str(refused.value)


def test_names_of_properties_are_no_keywords() -> None:
    """Nor are values of enum and const, defaults and examples."""
    names = ["not", "if", "contains", "uniqueItems", "$ref", "allOf"]
    schema = {
        "properties": dict.fromkeys(names, INT) | {"x": {"enum": [{"not": 1}], "default": {"$ref": 3}}},
        "$defs": {"if": INT},
    }
    made = enforceable(schema | {"additionalProperties": {"$ref": "#/$defs/if"}})
    assert isinstance(made, dict)
    assert made["properties"] == dict.fromkeys(names, INT) | {"x": {"enum": [{"not": 1}]}}


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value {i}" for i in range(20_000)]},
        {"anyOf": [{"enum": list(range(i, i + 10))} for i in range(0, MAX_VALUES + 10, 10)]},
        {"type": "object", "properties": {f"p{i}": {} for i in range(MAX_SCHEMAS + 1)}},
        {"description": "x" * MAX_BYTES},
        {"type": "string", "pattern": "a" * 5_000},
        {"type": "string", "maxLength": 10**6},
        nested(MAX_DEPTH + 2),
        nested(900),
    ],
)
def test_what_is_too_large_is_refused_at_once(schema: Any) -> None:
    began = time.thread_time()  # other processes have nothing to do with it
    with pytest.raises(OptionError, match=r"may have|more than"):
        enforceable(schema)
    assert time.thread_time() - began < 1


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        {"anyOf": [False, False]},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4},
        {"type": "number", "minimum": 3, "exclusiveMaximum": 3},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"enum": []},
    ],
)
def test_what_nothing_can_follow_is_refused(schema: Any) -> None:
    with pytest.raises(OptionError):
        enforceable(schema)


def test_recursion_with_a_way_out_stays() -> None:
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, NULL]}}, "required": ["next"]}
    made = enforceable(tree)
    assert isinstance(made, dict)
    assert made["$ref"] == "#/$defs/r0"


def test_choices_that_exclude_each_other_stay() -> None:
    made = enforceable(one_of("a", "b"))
    assert isinstance(made, dict)
    assert [part["properties"]["kind"] for part in made["anyOf"]] == [{"enum": ["a"]}, {"enum": ["b"]}]
    for both in ([{"const": 1}, {"const": 1.0}], [NULL, {"additionalProperties": True}]):  # null follows both
        with pytest.raises(OptionError, match="oneOf"):
            enforceable({"oneOf": both})


def test_choices_that_hold_each_other_are_compared_to_an_end() -> None:
    def holding(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"n": {"anyOf": [{"$ref": f"#/$defs/{name}"}]}}, "required": ["n"]}

    both = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": holding("a"), "b": holding("b")}}
    with pytest.raises(OptionError):
        enforceable(both)


@pytest.mark.parametrize(
    "pattern", ["(?=a)a", "(?!a)b", "(?i)a", "(?P<n>a)", "a^b", "a$b", r"\ba", r"(a)\1", r"\p{L}", "(^a)", "a{,3}"]
)
def test_an_expression_that_is_not_enforced_is_refused(pattern: str) -> None:
    with pytest.raises(OptionError, match="cannot be enforced with"):
        check_pattern(pattern, "pattern")


@pytest.mark.parametrize("pattern", ["^a|b$", r"[\]^$(?]", r"\^\$", "(?:ab){2,3}", r"[^]]"])
def test_signs_that_stand_for_themselves_pass(pattern: str) -> None:
    check_pattern(pattern, "pattern")


class Made:
    """Random schemas, most of them sensible."""

    PATTERNS = ("^a+$", "a", "^(ab|cd)*$", "x|yz", r"^\d{2}-\w$", "^[^x]$", "^.{2,4}$", r"\W", "^$", r"\x41", "[\\w-]+")

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def schema(self, depth: int = 2) -> Any:
        pick = self.random
        kinds = [self._leaf, self._string, self._number]
        if depth:
            kinds += [self._array, self._object, self._object, self._choice]
        return pick.choice(kinds)(depth)

    def _some(self, **keywords: Any) -> dict[str, Any]:
        return {name: value for name, value in keywords.items() if self.random.random() < 0.35}

    def _leaf(self, _: int) -> Any:
        values = [{"const": {"k": [1, "a"]}}, {"enum": [1, "a", None]}]
        return self.random.choice([True, {}, NULL, {"type": "boolean"}, *values])

    def _string(self, _: int) -> Any:
        low = self.random.randint(0, 3)
        return {"type": "string"} | self._some(
            minLength=low, maxLength=low + 2, pattern=self.random.choice(self.PATTERNS)
        )

    def _number(self, _: int) -> Any:
        bounds = [self.random.choice([0, 1, -3, 7, 0.5, -2.25, 12, 100]) for _ in range(4)]
        return {"type": self.random.choice(["integer", "number"])} | self._some(
            minimum=min(bounds),
            maximum=max(bounds),
            exclusiveMinimum=bounds[2],
            exclusiveMaximum=bounds[3],
            multipleOf=3,
        )

    def _array(self, depth: int) -> Any:
        first = [self.schema(depth - 1) for _ in range(2)]
        return {"type": "array"} | self._some(
            items=self.schema(depth - 1), prefixItems=first, minItems=self.random.randint(0, 3), maxItems=3
        )

    def _object(self, depth: int) -> Any:
        names = self.random.sample("abcde", 3)
        made = {"type": "object"} if self.random.random() < 0.8 else {}
        made |= self._some(properties={name: self.schema(depth - 1) for name in names}, required=names[:2])
        made |= self._some(additionalProperties=self.random.choice([True, False, self.schema(depth - 1)]))
        if self.random.random() < 0.2:
            made |= self._some(propertyNames={"maxLength": 2}, patternProperties={"^x": self.schema(depth - 1)})
        return made | self._some(minProperties=1, maxProperties=self.random.randint(2, 4))

    def _choice(self, depth: int) -> Any:
        kind = self.random.choice(["anyOf", "oneOf"])
        return {kind: [self.schema(depth - 1) for _ in range(self.random.randint(1, 3))]}


@pytest.mark.parametrize("seed", range(2))
def test_every_answer_follows_the_schema_it_was_asked_for(seed: int) -> None:
    """Random schemas; random tokens among those that are allowed; a validator of another library."""
    xgrammar = pytest.importorskip("xgrammar", reason="the extra 'constrained' is not installed")
    validator = pytest.importorskip("jsonschema_rs", reason="comes with schemathesis")
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=[end])
    vocabulary = info.decoded_vocab
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    make, checked, mask = Made(seed), 0, xgrammar.allocate_token_bitmask(1, info.vocab_size)
    while checked < 40:
        schema = make.schema()
        try:
            made = json.dumps(enforceable(schema))
            grammar = compiler.compile_json_schema(made, max_whitespace_cnt=2)
        except (OptionError, RuntimeError):  # refused by us, or by xgrammar
            continue
        matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=[end])
        answer = bytearray()
        while len(answer) < 200:
            matcher.fill_next_token_bitmask(mask, 0)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: info.vocab_size]
            allowed = [int(token) for token in np.nonzero(bits)[0]]
            assert allowed, (schema, bytes(answer))
            closing = [t for t in allowed if t == end or vocabulary[t] in (b'"', b"}", b"]", b",", b":")]
            plain = [t for t in allowed if t == end or 0x20 <= vocabulary[t][0] < 0x7F]
            some = closing if closing and make.random.random() < 0.5 else plain or allowed
            token = make.random.choice(some)
            if token == end:
                break
            assert matcher.accept_token(token)
            answer += vocabulary[token]
        else:
            continue
        value = json.loads(answer.decode(errors="replace"))
        told = json.dumps(value)
        if "Infinity" in told or r"\ud" in told:  # a number beyond all bounds, half a surrogate pair
            continue
        assert validator.Draft202012Validator(schema).is_valid(value), (schema, value)
        checked += 1
