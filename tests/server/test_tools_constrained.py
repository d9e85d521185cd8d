"""An answer that must be a call is one, with arguments that follow the tool's schema, whatever the model would say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from millpond.engine.grammar.compiler import Grammars
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.sampling.sampler import Sampler
from millpond.errors import OptionError
from millpond.server.messages import Function
from millpond.server.tools.formats import CallFormat, Hermes, Llama3, Mistral
from millpond.server.tools.reader import found_in
from tests.engine.test_constraint import PADDED, begin, byte_tokenizer

pytest.importorskip("xgrammar", reason="the extra 'constrained' is not installed: pip install 'millpond[constrained]'")
FORMATS = [Hermes(), Llama3(), Mistral(), Mistral(named=True)]
SCHEMA = {
    "type": "object",
    "required": ["city", "days"],
    "additionalProperties": False,
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [Function(name="get_weather", parameters=SCHEMA), Function(name="now")]


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(byte_tokenizer())


def said(sampler: Sampler, params: SamplingParams, seed: int, favoured: str = "") -> str:
    """What a model says whose logits are random; it likes some characters."""
    tokenizer = byte_tokenizer()
    generator = torch.Generator().manual_seed(seed)
    likes = torch.zeros(PADDED)
    likes[tokenizer.encode(favoured)] = 4.0
    broken = [i for i in range(256) if tokenizer.decode([i]) == "\ufffd"]
    likes[broken] -= 20
    likes[tokenizer.encode("}]")] = 3.0  # so that it ends
    begin(sampler, seed, params)
    tokens: list[int] = []
    for _ in range(3_000):
        (chosen,) = sampler([seed], torch.randn(1, PADDED, generator=generator) + likes)
        if chosen.token_id == tokenizer.eos_token_id:
            break
        tokens.append(chosen.token_id)
    sampler.stop(seed)
    return str(tokenizer.decode(tokens))


@pytest.mark.covering
@pytest.mark.parametrize("form", FORMATS, ids=["hermes", "llama3", "mistral", "mistral, named"])
@pytest.mark.parametrize("many", [False, True])
def test_the_answer_is_a_call_that_follows_the_schema(sampler: Sampler, form: CallFormat, many: bool) -> None:
    names = set()
    for seed in range(8):
        text = said(sampler, SamplingParams(seed=seed, structural_tag=form.calls(TOOLS, many)), seed, favoured="\x01\t")
        found = found_in([*(reader := form.reader({"get_weather", "now"}, 128)).add(text), *reader.finish()])
        assert found.calls, text
        assert found.content == ""
        assert many or len(found.calls) == 1
        for name, told in found.calls:
            names.add(name)
            arguments = json.loads(told)
            assert set(arguments) == ({"city", "days"} if name == "get_weather" else set())
            if arguments:
                assert len(arguments["city"]) <= 4
                assert 1 <= arguments["days"] <= 9
    assert names == {"get_weather", "now"}


@pytest.mark.parametrize("form", FORMATS, ids=["hermes", "llama3", "mistral", "mistral, named"])
def test_text_with_calls_may_be_text_alone_and_calls_in_it_follow_the_schema(form: CallFormat) -> None:
    import xgrammar

    tokenizer = byte_tokenizer()
    grammar = Grammars(tokenizer).of(SamplingParams(structural_tag=form.text_and_calls(TOOLS, True)))
    assert grammar is not None

    def taken(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar.compiled)
        return bool(matcher.accept_string(text) and matcher.accept_token(tokenizer.eos_token_id))

    good = {
        "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "llama3": '{"name": "now", "parameters": {}}',
        "mistral": '[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
    }[form.name]
    if form == Mistral(named=True):
        good = "[TOOL_CALLS]now[ARGS]{}"
    assert taken("Hello\tthere")
    assert taken(good)
    assert not taken(good.replace("{}", '{"a": 1}'))
    assert not taken(good.replace("now", "nobody"))


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        (
            [Function(name="f", parameters={"properties": {"a": {"type": "array", "uniqueItems": True}}})],
            "uniqueItems at",
        ),
        (
            [Function(name="f", parameters={"$ref": "http://other/schema"})],
            r"together with \$ref it cannot be enforced",
        ),
        ([Function(name="f", parameters={"type": "object", "not": {}})], "not at #: it cannot be enforced"),
        ([Function(name=f"f{n}", parameters={"title": "x" * 100_000}) for n in range(2)], "may have 131,072"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(tools: list[Function], words: str) -> None:
    grammars: Any = Grammars(byte_tokenizer())
    with pytest.raises(OptionError, match=words):
        grammars.of(SamplingParams(structural_tag=Hermes().calls(tools, True)))
    if len(tools) == 1:
        with pytest.raises(OptionError, match=r'behind .*"f"'):
            grammars.of(SamplingParams(structural_tag=Hermes().calls(tools, True)))
