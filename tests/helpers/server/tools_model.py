"""What the tests with real clients ask: a tiny random model, and a real one where it is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from millpond.engine.async_llm import AsyncLLM
from tests.engine.test_constraint import byte_tokenizer
from tests.helpers.models import REAL
from tests.helpers.server.live import Live, live
from tests.helpers.server.scripted import HERMES

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "required": ["city", "unit"],
        "additionalProperties": False,
        "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    },
}
TOOL: dict[str, Any] = {"type": "function", "function": WEATHER}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "unit": "celsius"}}\n</tool_call>'
ARGUMENTS = {"city": "Bern", "unit": "celsius"}
QUESTION = "How is the weather in Bern, in celsius?"


def random_engine() -> AsyncLLM:
    """Bytes at random, through a chat template that shows tools."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = HERMES
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    return AsyncLLM(model, tokenizer=tokenizer, model_name="random", method="full", kv_memory=2**24)


def real_engine() -> AsyncLLM:
    """An engine of a real model."""
    assert REAL is not None
    return AsyncLLM(REAL, model_name="real", method="full", kv_memory="512MiB")


def check_arguments(arguments: dict[str, Any]) -> None:
    """They follow the schema.

    The grammar counts half of a surrogate pair as one character; its three bytes are no UTF-8, and are decoded as three
    replacement characters. Only a tokenizer whose tokens are single bytes can write it.
    """
    assert set(arguments) == {"city", "unit"}
    assert len(arguments["city"].replace("\ufffd" * 3, "\ufffd")) <= 12
    assert arguments["unit"] in ("celsius", "fahrenheit")


@pytest.fixture(scope="module")
def random() -> Iterator[Live]:
    pytest.importorskip("xgrammar", reason="the extra is not installed: pip install 'millpond[constrained]'")
    with live(random_engine) as running:
        yield running


@pytest.fixture(scope="module")
def real() -> Iterator[Live]:
    with live(real_engine) as running:
        yield running
