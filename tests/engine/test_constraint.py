"""Answers under a JSON schema; random logits stand for the model."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from millpond.engine.sampling.params import SamplingParams
from millpond.engine.sampling.sampler import Sampler
from millpond.errors import OptionError
from millpond.install_command import install_command

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PADDED = 300  # rows of the output layer, more than there are tokens


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(BPE(vocab={c: i for i, c in enumerate([*alphabet, "</s>"])}, merges=[]))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", clean_up_tokenization_spaces=False)


def begin(sampler: Sampler, key: Any, params: SamplingParams) -> None:
    sampler.start(key, params, [], grammar=sampler.grammars.of(params))


def test_without_xgrammar_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(OptionError, match=re.escape(install_command("constrained"))):
        Sampler(byte_tokenizer()).grammars.of(SamplingParams(json_schema=SCHEMA))


def test_a_schema_ends_the_answer() -> None:
    with pytest.raises(OptionError, match="ignore_eos"):
        SamplingParams(json_schema=SCHEMA, ignore_eos=True)


def test_a_schema_must_be_json() -> None:
    with pytest.raises(OptionError, match="not JSON"):
        SamplingParams(json_schema={"type": {1, 2}})


class TestWithXgrammar:
    @pytest.fixture(autouse=True)
    def _needs_xgrammar(self) -> None:
        pytest.importorskip("xgrammar", reason="the extra 'constrained' is not installed")

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_answers_follow_the_schema(self, temperature: float) -> None:
        """Three constrained completions beside a free one, which goes its own way."""
        tokenizer = byte_tokenizer()
        sampler, end = Sampler(tokenizer), tokenizer.eos_token_id
        for key in range(3):
            begin(sampler, key, SamplingParams(temperature=temperature, seed=key, json_schema=SCHEMA))
        sampler.start("free", SamplingParams(temperature=0), [])
        generator, answers, free = torch.Generator().manual_seed(1), {key: [] for key in range(3)}, []
        running: list[Any] = [0, "free", 1, 2]
        broken = [i for i in range(256) if tokenizer.decode([i]) == "\ufffd"]  # bytes that are no text by themselves
        for _ in range(2000):
            logits = torch.randn(len(running), PADDED, generator=generator)
            logits[:, broken] -= 20
            for key, sampled in zip(list(running), sampler(running, logits), strict=True):
                if key == "free":
                    free.append(sampled.token_id == logits[running.index(key)].argmax())
                elif sampled.token_id == end:
                    sampler.stop(key)
                else:
                    answers[key].append(sampled.token_id)
            running = [key for key in running if key == "free" or key in sampler._states]
            if running == ["free"]:
                break
        assert running == ["free"]
        assert all(free)
        for tokens in answers.values():
            value = json.loads(tokenizer.decode(tokens))
            assert set(value) == {"name", "age"}
            assert 0 <= value["age"] <= 99
            assert len(value["name"]) <= 5

    def test_blanks_come_to_an_end(self) -> None:
        """The model wants nothing but blanks, and tabs most of all."""
        tokenizer = byte_tokenizer()
        sampler, answer = Sampler(tokenizer), []
        begin(sampler, "a", SamplingParams(temperature=0, json_schema={"type": "array", "items": {"type": "null"}}))
        logits = torch.zeros(1, PADDED)
        logits[0, tokenizer.convert_tokens_to_ids(["Ġ", "ĉ"])] = torch.tensor([5.0, 9.0])
        while not answer or answer[-1] != tokenizer.eos_token_id:
            assert len(answer) < 200
            answer.append(sampler(["a"], logits)[0].token_id)
        assert isinstance(json.loads(tokenizer.decode(answer[:-1])), list)

    def test_a_schema_that_cannot_be_followed_is_refused(self) -> None:
        with pytest.raises(OptionError, match="json_schema cannot be followed"):
            Sampler(byte_tokenizer()).grammars.of(SamplingParams(json_schema={"type": "string", "pattern": "["}))

    def test_a_schema_needs_a_tokenizer(self) -> None:
        with pytest.raises(OptionError, match="tokenizer"):
            Sampler().grammars.of(SamplingParams(json_schema=SCHEMA))
