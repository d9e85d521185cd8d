"""What users of vLLM write: prompts as mappings, chat, names of arguments and dtypes, and a shorter context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import millpond as mp
from millpond.engine.prompts import prompts_of
from millpond.errors import OptionError
from millpond.models.dtype_name import dtype_name

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHORT = mp.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[mp.LLM]:
    with mp.LLM("pond-recall") as made:
        yield made


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("a text", ["a text"]),
        ({"prompt": "a text"}, ["a text"]),
        ({"prompt_token_ids": [1, 2]}, [(1, 2)]),
        ([1, 2], [(1, 2)]),
        (np.array([1, 2]), [(1, 2)]),
        (torch.tensor([[1, 2], [3, 4]]), [(1, 2), (3, 4)]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        ([{"prompt": "a"}, {"prompt_token_ids": [4]}, "b", [5]], ["a", (4,), "b", (5,)]),
        ([], []),
    ],
    ids=str,
)
def test_what_a_prompt_may_be(given: Any, meant: list[Any]) -> None:
    assert prompts_of(given) == meant


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"text": "x"}, "'prompt', a text, or 'prompt_token_ids'"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "'prompt', a text, or 'prompt_token_ids'"),
        ({"prompt": 5}, "'prompt', a text, or 'prompt_token_ids'"),
        ({"prompt_token_ids": "12"}, "'prompt', a text, or 'prompt_token_ids'"),
        ([{"role": "user", "content": "hi"}], "LLM.chat"),
        ({"role": "user", "content": "hi"}, "LLM.chat"),
        (5, "is no prompt"),
        ([1.5], "is no prompt"),
        ([[True]], "is no prompt"),
        ([None], "is no prompt"),
    ],
    ids=str,
)
def test_what_is_no_prompt(given: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        prompts_of(given)


def test_a_mapping_is_answered_as_its_text(llm: mp.LLM) -> None:
    text = "anna kettle quiet rain <ask> anna <is>"
    (one,), (other,) = llm.generate(text, SHORT), llm.generate({"prompt": text}, sampling_params=SHORT)
    assert one.completions[0].token_ids == other.completions[0].token_ids
    assert other.outputs is other.completions


def test_two_names_of_one_argument_are_refused(llm: mp.LLM) -> None:
    with pytest.raises(OptionError, match="two names of one argument"):
        llm.generate("anna", SHORT, sampling_params=SHORT)


def test_chat_writes_messages_by_the_template(llm: mp.LLM) -> None:
    messages = [{"role": "system", "content": "quiet rain"}, {"role": "user", "content": "anna kettle"}]
    (answer,) = llm.chat(messages, SHORT, chat_template=TEMPLATE)
    written = "<system>quiet rain<user>anna kettle<assistant>"
    assert list(answer.prompt_token_ids) == llm.get_tokenizer().encode(written, add_special_tokens=False)
    parts = [{"type": "text", "text": "anna "}, {"type": "text", "text": "kettle"}]
    (same,) = llm.chat([messages[0], {"role": "user", "content": parts}], SHORT, chat_template=TEMPLATE)
    assert same.prompt_token_ids == answer.prompt_token_ids
    several = llm.chat([messages, messages[1:]], sampling_params=SHORT, chat_template=TEMPLATE)
    assert [len(one.outputs[0].token_ids) for one in several] == [3, 3]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "without messages"),
        ([{"content": "x"}], "is no message"),
        ([["x"]], "is no message"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "is no part of a message"),
    ],
    ids=str,
)
def test_what_is_no_conversation(llm: mp.LLM, messages: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        llm.chat(messages, SHORT, chat_template=TEMPLATE)


WITH_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + TEMPLATE
WITH_CALLS = WITH_TOOLS.replace("{% endfor %}{% if", "{{ m.tool_calls or '' }}{% endfor %}{% if")
TOOLS = [{"type": "function", "function": {"name": "kettle", "parameters": {"type": "object"}}}]
CALLING = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"} | TOOLS[0]]}


def test_tools_and_calls_that_a_template_leaves_out_are_refused(llm: mp.LLM) -> None:
    said = [{"role": "user", "content": "kettle"}]
    with pytest.raises(OptionError, match=r"leaves tools out, .*chat_template="):
        llm.chat(said, SHORT, tools=TOOLS, chat_template=TEMPLATE)
    with pytest.raises(OptionError, match="leaves tools out"):
        llm.chat([said, said], SHORT, chat_template=TEMPLATE, chat_template_kwargs={"tools": TOOLS})
    with pytest.raises(OptionError, match="leaves calls of tools out"):
        llm.chat([*said, CALLING], SHORT, chat_template=WITH_TOOLS)
    (shown,) = llm.chat([*said, CALLING], SHORT, tools=TOOLS, chat_template=WITH_CALLS)
    assert llm.get_tokenizer().decode(shown.prompt_token_ids).startswith("kettle")
    llm.chat([*said, CALLING | {"tool_calls": [], "content": "x"}], SHORT, tools=[], chat_template=TEMPLATE)


def test_a_model_without_a_template_has_no_chat() -> None:
    tokenizer: Any = mp.load_tokenizer("pond-recall")
    tokenizer.chat_template = None
    with mp.LLM("pond-recall", tokenizer=tokenizer) as made, pytest.raises(OptionError, match="brings no chat"):
        made.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("given", "meant"),
    [("bfloat16", "bf16"), ("half", "f16"), ("float", "f32"), (torch.float32, "f32"), ("bf16", "bf16"), (None, None)],
    ids=str,
)
def test_names_of_dtypes(given: Any, meant: str | None) -> None:
    assert dtype_name(given) == meant


def test_dtypes_of_torch_load(llm: mp.LLM) -> None:
    assert mp.load_model("pond-recall", torch.float16).dtype == torch.float16
    with mp.LLM("pond-recall", dtype="float32") as made:
        assert made.engine._model.dtype == torch.float32
    with pytest.raises(OptionError, match="unknown dtype 'int8'"):
        mp.LLM("pond-recall", dtype="int8")


def test_a_context_may_be_shorter_than_the_models() -> None:
    with mp.LLM("pond-recall", max_model_len=16) as made:
        assert made.engine.context_length == 16
        (answer,) = made.generate([[5] * 10], mp.SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 6
        with pytest.raises(OptionError, match="the prompt has 16 tokens"):
            made.generate([[5] * 16], SHORT)


@pytest.mark.parametrize(("most", "said"), [(10**9, "is more than the"), (0, "at least 1")])
def test_a_context_is_not_longer_than_the_models(most: int, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        mp.LLM("pond-recall", max_model_len=most)
