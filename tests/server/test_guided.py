"""Answers that must follow something, over HTTP: vLLM's words, the real engine, and what cannot be followed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from millpond.engine.async_llm import AsyncLLM
from server.test_chat import chat
from server.test_completions import ask, events
from tests.engine.test_constraint import byte_tokenizer
from tests.helpers.server.fake import FakeLLM
from tests.helpers.server.live import Live, live

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("body", "name", "value"),
    [
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"json": {}}}, "json_schema", {}),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ("a",)),
        ({"structured_outputs": {"structural_tag": '{"type": "x"}'}}, "structural_tag", {"type": "x"}),
    ],
)
def test_the_words_of_vllm(body: dict[str, Any], name: str, value: Any) -> None:
    llm = FakeLLM()
    assert ask({"prompt": "w5"} | body, llm).status_code == 200
    assert chat(body, llm).status_code == 200
    for request in llm.asked:
        assert (request.params.constrained, getattr(request.params, name)) == (name, value)


STRUCTURES = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f>"],
    "tags": [{"type": "tag", "begin": "<f>", "end": "</f>", "content": {"type": "json_schema", "json_schema": SCHEMA}}],
}


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ({"type": "structural_tag", "format": {"type": "any_text"}}, {"type": "any_text"}),
        ({"type": "structural_tag"} | STRUCTURES, TRIGGERED),
    ],
)
def test_a_structural_tag_may_be_whole(tag: dict[str, Any], expected: dict[str, Any]) -> None:
    llm = FakeLLM()
    for given in (tag, json.dumps(tag)):
        assert ask({"prompt": "w5", "structured_outputs": {"structural_tag": given}}, llm).status_code == 200
    assert chat({"response_format": tag}, llm).status_code == 200
    for request in llm.asked:
        assert request.params.structural_tag == expected


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({"type": "structural_tag"}, "either a format, or structures and triggers"),
        ({"type": "structural_tag", "format": {}, "triggers": ["<"]}, "either a format, or structures and triggers"),
        ({"type": "structural_tag", "structures": [], "triggers": ["<"]}, "structures"),
        ({"type": "structural_tag", "form": {}}, "form"),
        ({"structures": [{"begin": 1, "schema": {}, "end": ""}], "triggers": ["<"]}, "begin"),
    ],
)
def test_what_is_no_structural_tag_is_named(tag: dict[str, Any], words: str) -> None:
    answers = [ask({"prompt": "w5", "structured_outputs": {"structural_tag": tag}})]
    if "type" in tag:
        answers.append(chat({"response_format": tag}))
    for found, name in zip(answers, ("structured_outputs.structural_tag", "response_format"), strict=False):
        assert found.status_code == 400, found.text
        assert words in found.json()["error"]["message"]
        assert name in found.json()["error"]["message"]


def test_a_structural_tag_beside_tools_is_one_too_many() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    found = chat({"response_format": tag, "tools": [tool], "tool_choice": "required"})
    assert found.status_code == 400
    assert found.json()["error"]["param"] in ("response_format", "tool_choice")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex and guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex and structured_outputs.regex"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.regex and structured_outputs.choice",
        ),
        ({"structured_outputs": {}}, "must hold one of"),
        ({"structured_outputs": {"json_object": False}}, "must hold"),
        ({"guided_json": "{"}, "guided_json is no JSON"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": '{"minimum": NaN}'}, "JSON"),
        ({"structured_outputs": {"structural_tag": "[1]"}}, "object"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "choice holds no text"),
        ({"guided_choice": ["a"] * 1_001}, "guided_choice"),
        ({"guided_regex": "a" * 2_001}, "2000"),
        ({"guided_grammar": "a" * 70_000}, "65536"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ],
)
def test_what_cannot_be_is_refused(body: dict[str, Any], words: str) -> None:
    for found in (ask({"prompt": "w5"} | body), chat(body)):
        assert found.status_code == 400, found.text
        assert words in found.json()["error"]["message"]


def test_a_format_beside_a_guide_is_one_too_many() -> None:
    found = chat({"response_format": {"type": "json_object"}, "guided_regex": "a"})
    assert found.status_code == 400
    assert "guided_regex and response_format" in found.json()["error"]["message"]


def bytes_llm() -> AsyncLLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=257,
        max_position_embeddings=512,
        eos_token_id=256,
        bos_token_id=256,
    )
    model = LlamaForCausalLM(config).eval()
    return AsyncLLM(model, tokenizer=byte_tokenizer(), model_name="bytes", method="full")


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(bytes_llm) as running:
        yield running


class TestWithXgrammar:
    @pytest.fixture(autouse=True)
    def _needs_xgrammar(self) -> None:
        pytest.importorskip("xgrammar", reason="the extra 'constrained' is not installed: pip install xgrammar")

    def post(self, server: Live, body: dict[str, Any]) -> Any:
        with server.client() as client:
            return client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 100, "seed": 1} | body)

    @pytest.mark.parametrize(
        ("body", "allowed"),
        [
            ({"guided_regex": "(yes|no)!"}, {"yes!", "no!"}),
            ({"guided_choice": ["one", "two"]}, {"one", "two"}),
            ({"guided_grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
            ({"structured_outputs": {"json": {"enum": [1, None]}}}, {"1", "null"}),
        ],
    )
    def test_answers_follow(self, server: Live, body: dict[str, Any], allowed: set[str]) -> None:
        (choice,) = self.post(server, body).json()["choices"]
        assert choice["text"] in allowed
        assert choice["finish_reason"] == "stop"
        streamed = events(self.post(server, body | {"stream": True}).text)
        assert "".join(piece["choices"][0]["text"] for piece in streamed) == choice["text"]

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 2}}, "json_schema"),
            ({"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}}, "no value"),
            ({"guided_json": {"type": "array", "contains": {"const": 1}}}, "contains"),
            ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
            ({"guided_json": {"not": {"type": "null"}}}, "not"),
            ({"guided_json": {"if": {}, "then": {}}}, "if"),
            ({"guided_json": {"$ref": "http://example.org/x"}}, "$ref"),
            ({"guided_json": {"enum": [*range(20_000)]}}, "enum"),
            ({"guided_grammar": "root ::= missing"}, "missing"),
            ({"guided_regex": "(?=a)a"}, "cannot be enforced"),
            ({"guided_regex": "["}, "regex"),
            ({"guided_regex": "a{99999999999}"}, "repeats more than 10,000 times"),
            ({"guided_regex": "a{4294967297}"}, "repeats more"),
            ({"guided_grammar": 'root ::= "a"{20000}'}, "repeats"),
            ({"structured_outputs": {"structural_tag": {"type": "none"}}}, "structural_tag"),
        ],
    )
    def test_what_cannot_be_followed_is_400_with_the_reason(self, server: Live, body: Any, words: str) -> None:
        for more in ({}, {"stream": True}):
            found = self.post(server, body | more)
            assert found.status_code == 400, found.text
            assert words in found.json()["error"]["message"]
            assert ".cc:" not in found.text

    def test_forbidden_tokens_and_a_grammar_that_leave_nothing_are_400(self, server: Live) -> None:
        token = byte_tokenizer().convert_tokens_to_ids("z")
        found = self.post(server, {"guided_regex": "[a-y]+", "allowed_token_ids": [token]})
        assert found.status_code == 400
        assert "no token of the vocabulary goes on as the regex wants within allowed_token_ids" in found.text
        assert (
            self.post(server, {"guided_regex": "[a-z]+", "allowed_token_ids": [token]}).json()["choices"][0]["text"]
            == "z" * 100
        )

    def test_a_large_schema_holds_nobody_up(self, server: Live) -> None:
        """Five at a time, beyond what may be compiled or long in the making: a bystander's answers come as alone."""
        sizes = (20_000, 20_000, 1_000)
        large: list[Any] = [{"enum": [f"value {i} {n}" for n in range(size)]} for i, size in enumerate(sizes)]
        large += [
            {"properties": {f"k{i}": {"type": "string", "maxLength": 4_000 + i + more} for i in range(15)}}
            for more in (0, 1)
        ]

        def bystander() -> float:
            began = time.monotonic()
            assert self.post(server, {"max_tokens": 4, "ignore_eos": True}).status_code == 200
            return time.monotonic() - began

        usual = max(bystander() for _ in range(3))
        with ThreadPoolExecutor(5) as pool:
            asked = [pool.submit(self.post, server, {"guided_json": schema, "max_tokens": 1}) for schema in large]
            waits = [bystander() for _ in range(5)]
            while not all(one.done() for one in asked):
                waits.append(bystander())
        assert [one.result().status_code for one in asked][:3] == [400, 400, 200]
        assert max(waits) < 10 * usual + 1.0
