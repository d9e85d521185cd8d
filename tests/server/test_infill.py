"""Text in the middle: which tokens ask for it, `suffix` of completions, and llama.cpp's route."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from millpond.server.fill_in import fill_in_of
from millpond.server.infill_format import indented, picked
from server.test_completions import ask, events
from tests.engine.test_constraint import byte_tokenizer
from tests.helpers.models import needs_real_model
from tests.helpers.server.fake import FakeLLM, client_of
from tests.helpers.server.live import live
from tests.helpers.server.scripted import ScriptedLLM
from tests.helpers.server.tools_model import real_engine

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")
CODE_LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<|EOT|>")
CODESTRAL = ("[PREFIX]", "[SUFFIX]")


def model_of(names: tuple[str, ...] = QWEN, *texts: str, special: tuple[str, ...] = (), step: int = 3) -> ScriptedLLM:
    """A scripted engine whose tokenizer has these tokens."""
    llm = ScriptedLLM(*texts or ("Hi",), step=step)
    llm.tokenizer.add_tokens([name for name in names if name not in special])
    llm.tokenizer.add_tokens(list(special), special_tokens=True)
    return llm


def infill(body: dict[str, Any], llm: FakeLLM | None = None, **settings: Any) -> Any:
    return ask({"input_prefix": "ab", "input_suffix": "yz"} | body, llm or model_of(), "/infill", **settings)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (QWEN, "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>m"),
        (STARCODER, "<fim_prefix>ab<fim_suffix>yz<fim_middle>m"),
        (CODE_LLAMA, "▁<PRE>ab▁<SUF>yz▁<MID>m"),
        (DEEPSEEK, "<｜fim▁begin｜>ab<｜fim▁hole｜>yz<｜fim▁end｜>m"),
        (CODESTRAL, "[SUFFIX]yz[PREFIX]abm"),
    ],
)
def test_each_family_is_asked_in_its_own_way(names: tuple[str, ...], expected: str) -> None:
    llm = model_of(names)
    assert infill({"prompt": "m"}, llm).status_code == 200
    assert llm.prompt() == expected
    if not expected.startswith("[SUFFIX]"):
        llm.says("Hi")
        ask({"prompt": "ab", "suffix": "yz"}, llm)
        assert llm.prompt() == expected.removesuffix("m")


def test_a_first_token_stays_in_front() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(QWEN))
    fill = fill_in_of(tokenizer)
    assert fill is not None
    assert fill.first == ()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id

    class First:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def encode(self, text: str, **how: Any) -> list[int]:
            return [bos, *tokenizer.encode(text, **how)]

    found = fill_in_of(First())
    assert found is not None
    assert found.prompt((1,), (2,))[:2] == (bos, found.before)
    assert found.among_files(found.prompt((1,), (2,)), (7,), [(8,)])[:3] == (bos, found.project, 7)


@pytest.mark.parametrize("names", [(), ("<|fim_prefix|>", "<|fim_suffix|>"), ("<fim_prefix>", "<|fim_suffix|>")])
def test_other_models_are_refused_with_the_way_out(names: tuple[str, ...]) -> None:
    assert fill_in_of(None) is None
    for found in (infill({}, model_of(names)), ask({"prompt": "ab", "suffix": "yz"}, model_of(names))):
        assert found.status_code == 400
        assert "Qwen2.5-Coder" in found.json()["error"]["message"]
    assert ask({"prompt": "ab", "suffix": ""}, model_of(names)).status_code == 200


def test_what_ends_an_answer() -> None:
    llm = model_of((*QWEN, "<|endoftext|>"), special=("<|endoftext|>",))
    end = llm.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    infill({"stop": ["\n\n"], "stop_token_ids": [5]}, llm)
    params = llm.asked[0].params
    assert params.stop == ("\n\n", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
    assert params.stop_token_ids == (5, end)
    ask({"prompt": "ab", "suffix": "yz", "stop": "x"}, llm)
    assert llm.asked[1].params.stop[:2] == ("x", "<|fim_pad|>")
    ask({"prompt": "ab"}, llm)
    assert llm.asked[2].params.stop == ()


def test_other_files_stand_in_front() -> None:
    extra = {"input_extra": [{"filename": "a.py", "text": "one"}, {"text": "two"}]}
    llm = model_of()
    infill(extra, llm)
    assert llm.prompt() == (
        "<|repo_name|>project\n<|file_sep|>a.py\none\n<|file_sep|>file\ntwo\n<|file_sep|>file\n"
        "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"
    )
    without = model_of(STARCODER)
    infill(extra, without)
    assert without.prompt() == "<fim_prefix>one\n\ntwo\n\nab<fim_suffix>yz<fim_middle>"


def test_prompts_of_completions_may_be_tokens_or_several() -> None:
    llm = model_of()
    ids = llm.tokenizer.encode("ab")
    found = ask({"prompt": [ids, ids], "suffix": "yz"}, llm)
    assert len(found.json()["choices"]) == 2
    assert llm.prompt(0) == llm.prompt(1) == "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"
    assert ask({"prompt": "", "suffix": "yz"}, llm).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"echo": True},
        {"millpond": {"keep": [[0, 1]]}},
        {"millpond": {"chunks": [[0, 1]]}},
        {"millpond": {"breakpoints": [1]}},
        {"millpond": {"fair_shares": [[0, 1, 0.5]]}},
    ],
)
def test_spans_of_a_prompt_go_without_a_suffix(body: dict[str, Any]) -> None:
    found = ask({"prompt": "ab", "suffix": "yz"} | body, model_of())
    assert found.status_code == 400
    assert "suffix" in found.json()["error"]["message"]


def test_an_answer_has_llama_cpp_s_words() -> None:
    found = infill({"n_predict": 20}, model_of(QWEN, "mid\ndle")).json()
    assert (found["content"], found["stop"], found["stop_type"]) == ("mid\ndle", True, "eos")
    assert found["has_new_line"] is True
    assert (found["tokens_predicted"], found["tokens_evaluated"], found["tokens_cached"]) == (3, 7, 3)
    assert (found["timings"]["predicted_n"], found["timings"]["prompt_n"], found["model"]) == (3, 4, "fake/counter")


def test_a_stream_put_together_is_the_whole_answer() -> None:
    for indent in (0, 2):
        llm = model_of(QWEN, "a\n  b\n\n   c\nd e f", step=1)
        found = infill({"stream": True, "n_indent": indent}, llm)
        pieces = [json.loads(part.removeprefix("data: ")) for part in found.text.split("\n\n") if part]
        assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        text = "".join(piece["content"] for piece in pieces)
        assert text == ("a\n  b\n\n   c" if indent else "a\n  b\n\n   c\nd e f")
        assert infill({"n_indent": indent}, model_of(QWEN, "a\n  b\n\n   c\nd e f")).json()["content"] == text


@pytest.mark.parametrize(
    ("text", "least", "expected"),
    [
        ("a\nb", 0, ("a\nb", False)),
        ("a\nb", 1, ("a", True)),
        ("a\n b", 1, ("a\n b", False)),
        ("a", 4, ("a", False)),
        ("", 4, ("", False)),
        ("a\n", 4, ("a", False)),
        ("a\n\n\n", 4, ("a", False)),
        ("a\n  ", 4, ("a", False)),
        ("a\n\t\tb\n\n\t\tc\n", 2, ("a\n\t\tb\n\n\t\tc", False)),
        ("\n  x\ny", 2, ("\n  x", True)),
    ],
)
def test_lines_that_are_indented_less(text: str, least: int, expected: tuple[str, bool]) -> None:
    assert indented(text, least) == expected


def test_an_answer_ends_when_the_rest_would_be_cut_off_or_time_is_up() -> None:
    async def cancelled(body: dict[str, Any], text: str) -> tuple[bool, str]:
        llm = model_of(QWEN, text)
        async with client_of(llm) as client:
            found = await client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"} | body)
        return bool(llm._cancelled), found.json()["content"]

    assert asyncio.run(cancelled({"n_indent": 4}, "a\nb c d e")) == (True, "a")
    assert asyncio.run(cancelled({"n_indent": 4}, "a\n    b c")) == (False, "a\n    b c")
    assert asyncio.run(cancelled({"t_max_predict_ms": 0}, "a b c d"))[0] is False
    assert asyncio.run(cancelled({"t_max_predict_ms": 1e-9}, "a b c d"))[0] is True


def test_nothing_new_may_be_wanted_and_fields_may_be_chosen() -> None:
    """What editors send to have a prompt read before it is needed."""
    llm = model_of()
    fields = ["content", "timings/prompt_n", "none", "timings/none/none"]
    found = infill({"n_predict": 0, "response_fields": fields, "cache_prompt": True, "id_slot": 0}, llm)
    assert found.json() == {"content": "", "timings/prompt_n": 4}
    assert llm.asked[0].params.max_tokens == 1
    assert picked({"a": {"b": None}}, ["a/b"]) == {}
    infill({"n_predict": -1, "samplers": ["top_k", "infill"], "t_max_prompt_ms": 500, "top_k": 40}, llm)
    assert (llm.asked[1].params.max_tokens, llm.asked[1].params.top_k) == (None, 40)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n_predict": -2}, "n_predict"),
        ({"n_indent": -1}, "n_indent"),
        ({"n_indent": 10**30}, "n_indent"),
        ({"input_extra": {}}, "input_extra"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        ({"input_extra": [{"text": ""}] * 300}, "input_extra"),
        ({"input_prefix": 5}, "input_prefix"),
        ({"input_prefix": None}, "input_prefix"),
        ({"t_max_predict_ms": -1}, "t_max_predict_ms"),
        ({"response_fields": ["x" * 1_000]}, "response_fields"),
        ({"input_sufix": "x"}, "did you mean 'input_suffix'"),
        ({"input_prefix": "x" * 4_000_000}, "characters"),
        ({"n_predict": 200_000}, "context"),
        ({"input_extra": [{"text": "x" * 100_000}] * 40}, "characters"),
        ({"millpond": {"keep": [[0, 1]]}}, "keep"),
        ({"millpond": {"forgotten": True}}, "forgotten"),
        ({"millpond": {"fair_shares": 0.5}}, "fair_shares"),
    ],
)
def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    found = infill(body)
    assert found.status_code == 400, found.text
    assert words in found.json()["error"]["message"]


def test_streams_of_completions_with_a_suffix() -> None:
    found = ask({"prompt": "ab", "suffix": "yz", "stream": True}, model_of(QWEN, "middle"))
    assert "".join(piece["choices"][0]["text"] for piece in events(found.text)) == "middle"


@pytest.mark.slow
@needs_real_model
def test_a_real_model_fills_in_or_says_why_not() -> None:
    before, behind = "def fib(n):\n    if n < 2:\n        return n\n    return ", "\n\nprint(fib(10))\n"
    with live(real_engine) as server, server.client() as client:
        body = {"input_prefix": before, "input_suffix": behind, "n_predict": 16, "temperature": 0}
        found = client.post("/infill", json=body)
        completed = client.post("/v1/completions", json={"prompt": before, "suffix": behind, "temperature": 0})
        if fill_in_of(server.llm.tokenizer) is None:
            assert [one.status_code for one in (found, completed)] == [400, 400]
        else:
            assert "fib(n" in found.json()["content"]
            assert completed.json()["choices"][0]["text"] == found.json()["content"]
