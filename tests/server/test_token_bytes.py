"""Bytes of tokens over HTTP: log probabilities, streams, whole answers and detokenized ids say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from millpond.engine.async_llm import AsyncLLM
from millpond.engine.completion import with_texts
from millpond.engine.token_bytes import TokenBytes
from millpond.server.usage import for_chat, for_completions
from tests.engine.test_constraint import byte_tokenizer
from tests.engine.test_detokenizer import tokenizer_of
from tests.helpers.server.live import Live, live

KINDS = ("byte-level", "byte-fallback")


def tokenizer(kind: str) -> Any:
    return byte_tokenizer() if kind == "byte-level" else tokenizer_of(kind)


def says_bytes(kind: str) -> AsyncLLM:
    """A model of random weights."""
    torch.manual_seed(0)
    known = tokenizer(kind)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=len(known),
        max_position_embeddings=512,
        eos_token_id=known.eos_token_id,
        bos_token_id=known.eos_token_id,
    )
    return AsyncLLM(LlamaForCausalLM(config).eval(), tokenizer=known, model_name="bytes", method="full")


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Live]]:
    with live(partial(says_bytes, request.param)) as running:
        yield request.param, running


def test_they_say_the_same(server: tuple[str, Live]) -> None:
    kind, running = server
    known = TokenBytes(tokenizer(kind))
    asked = {"messages": [{"role": "user", "content": "a\u20ac"}], "max_tokens": 40, "seed": 3, "ignore_eos": True}
    more = {"logprobs": True, "top_logprobs": 4}
    by_bytes = {known.of(token): token for token in range(len(tokenizer(kind)))}
    with running.client() as client:
        whole = client.post("/v1/chat/completions", json=asked | more).json()["choices"][0]
        told, text = whole["logprobs"]["content"], whole["message"]["content"]
        assert "\ufffd" in text
        lines = client.post("/v1/chat/completions", json=asked | {"stream": True}).text.splitlines()
        streamed = [line[6:] for line in lines if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in streamed]
        assert "".join(deltas) == text
        ids = [by_bytes[bytes(one["bytes"])] for one in told]
        back = client.post("/detokenize", json={"tokens": [i for i in ids if i not in known.special]}).json()["prompt"]
        assert back == text == known.text(ids, True)
        assert len(ids) == 40
        assert all(bytes(top["bytes"]) in by_bytes for one in told for top in one["top_logprobs"])
        assert any(one["token"] == "\ufffd" != bytes(one["bytes"]).decode("utf-8", "ignore") for one in told)
        ended = client.post("/v1/chat/completions", json=asked | {"stop": "\ufffd"}).json()["choices"][0]
        assert (ended["finish_reason"], ended["message"]["content"]) == ("stop", text[: text.index("\ufffd")])


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_those_of_characters(kind: str) -> None:
    """A character's tokens are at its place, and so is what follows."""
    known = tokenizer_of(kind)
    text = "a\u20ac\U0001f642 a"
    ids = known.encode(text, add_special_tokens=False)
    found = [with_texts(known, one, -1.0, [(one, -1.0)]) for one in ids]
    shown = for_completions(ids, found, [one.text for one in found], 10, text)
    assert shown["text_offset"][0] == (10 if kind == "byte-level" else 9)  # with the blank that the text is without
    assert shown["text_offset"][-1] == 10 + text.rindex(found[-1].text)
    assert {10 + text.index("\u20ac"), 10 + text.index("\U0001f642")} <= {*shown["text_offset"]}
    assert sorted(shown["text_offset"]) == shown["text_offset"]
    spelled = b"".join(bytes(one["bytes"]) for one in for_chat(found)["content"])
    assert spelled.decode().removeprefix(" ") == text
