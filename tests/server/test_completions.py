"""Completions: whole, streamed, several, scored; against an engine that counts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.helpers.server.fake import TOKEN_BYTES, FakeLLM, client_of


def ask(body: dict[str, Any], llm: FakeLLM | None = None, path: str = "/v1/completions", **settings: Any) -> Any:
    async def work() -> Any:
        async with client_of(llm or FakeLLM(), **settings) as client:
            return await client.post(path, json=body)

    return asyncio.run(work())


def events(text: str) -> list[dict[str, Any]]:
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


def test_a_completion_has_text_reason_and_numbers() -> None:
    found = ask({"model": "fake/counter", "prompt": "w5 w6", "max_tokens": 3}).json()
    assert found["object"] == "text_completion"
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (" w7 w8 w9", "length", None)
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 3, 6)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert usage["millpond"]["full_kv_bytes"] == 6 * TOKEN_BYTES
    assert usage["millpond"]["kv_bytes"] == 3 * TOKEN_BYTES
    assert choice["millpond"]["finish_reason"] == "length"


def test_without_a_limit_a_completion_has_sixteen_tokens() -> None:
    assert ask({"prompt": "w5"}).json()["usage"]["completion_tokens"] == 16
    assert ask({"prompt": "w5"}, max_tokens=4).json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "prompt", ["w5 w6", [1, 5, 6], ["w5 w6", "w9"], [[1, 5, 6], [1, 9]]], ids=["text", "ids", "texts", "lists of ids"]
)
def test_every_kind_of_prompt(prompt: Any) -> None:
    found = ask({"prompt": prompt, "max_tokens": 2, "n": 2}).json()
    expected = [" w7 w8", " w17 w18", " w10 w11", " w20 w21"][: 2 if prompt in ("w5 w6", [1, 5, 6]) else 4]
    assert [choice["text"] for choice in found["choices"]] == expected
    assert [choice["index"] for choice in found["choices"]] == list(range(len(expected)))
    assert found["usage"]["completion_tokens"] == 2 * len(expected)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "w5 w6", "max_tokens": 4},
        {"prompt": "w5 w6", "max_tokens": 4, "n": 3},
        {"prompt": ["w5", "w6 w7", "w8"], "max_tokens": 5, "logprobs": 2},
        {"prompt": [1, 5, 6], "max_tokens": 3, "logprobs": 1, "echo": True},
        {"prompt": "w5 w6", "max_tokens": 0, "logprobs": 0, "echo": True},
    ],
)
def test_a_stream_put_together_is_the_whole_answer(body: dict[str, Any]) -> None:
    whole = ask(body).json()
    stream = events(ask(body | {"stream": True, "stream_options": {"include_usage": True}}).text)
    *pieces, last = stream
    assert last["choices"] == []
    without = {name: value for name, value in last["usage"].items() if name != "millpond"}
    assert without == {name: value for name, value in whole["usage"].items() if name != "millpond"}
    assert all(piece["usage"] is None and piece["id"] == pieces[0]["id"] for piece in pieces)
    for choice in whole["choices"]:
        own = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + ["length"]
        if "logprobs" in body:
            for name, values in choice["logprobs"].items():
                assert [value for piece in own for value in piece["logprobs"][name]] == values


def test_a_stream_says_nothing_of_numbers_unasked() -> None:
    stream = events(ask({"prompt": "w5", "max_tokens": 2, "stream": True}).text)
    assert all("usage" not in piece for piece in stream)


def test_echo_scores_the_prompt_as_lm_eval_reads_it() -> None:
    body = {"prompt": [[1, 5, 6, 8]], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    (choice,) = ask(body).json()["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith("<bos> w5 w6 w8")
    assert told["tokens"][:-1] == ["<bos>", " w5", " w6", " w8"]
    assert told["token_logprobs"][:-1] == [None, -9.0, -0.5, -0.5]
    greedy = [
        max(top, key=top.get) == token for token, top in zip(told["tokens"], told["top_logprobs"], strict=True) if top
    ]
    assert greedy[:-1] == [False, True, True]  # what the fake finds likeliest: even ids
    assert told["text_offset"][0] == 0


def test_no_new_token_is_given_where_none_is_wanted() -> None:
    found = ask({"prompt": "w5 w6", "max_tokens": 0, "echo": True, "logprobs": 0}).json()
    assert found["choices"][0]["text"] == "w5 w6"
    assert len(found["choices"][0]["logprobs"]["tokens"]) == 3
    assert found["usage"]["completion_tokens"] == 0


def test_fields_reach_the_engine() -> None:
    llm = FakeLLM()
    ask(
        {
            "prompt": "w5",
            "max_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "seed": 3,
            "n": 2,
            "best_of": 2,
            "stop": "w99",
            "stop_token_ids": [4],
            "logit_bias": {"7": -3},
            "ignore_eos": True,
            "frequency_penalty": 1,
            "presence_penalty": -1,
            "repetition_penalty": 1.5,
            "skip_special_tokens": False,
            "user": "me",
            "metadata": {"a": "b"},
            "typical_p": 0.4,
            "min_tokens": 1,
            "bad_words": ["w6"],
            "allowed_token_ids": [5, 4],
            "millpond": {
                "method": "snapkv",
                "budget": 0.25,
                "codec": "int8",
                "options": {"window": 8},
                "priority": 2,
                "deadline_s": 9,
                "watch": True,
            },
        },
        llm,
        timeout_s=5,
    )
    (request,) = llm.asked
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (2, 0.5, 0.9, 7, 0.1)
    assert (params.seed, params.n, params.stop, params.stop_token_ids) == (3, 2, ("w99",), (4,))
    assert (params.logit_bias, params.ignore_eos, params.skip_special_tokens) == ({7: -3}, True, False)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert (params.typical_p, params.min_tokens) == (0.4, 1)
    assert (params.bad_words, params.allowed_token_ids) == (("w6",), (5, 4))
    cache = request.cache
    assert (cache.method, cache.budget, cache.codec, cache.options) == ("snapkv", 0.25, "int8", {"window": 8})
    assert (request.priority, request.deadline, request.watch) == (2, 5, True)


def test_fields_that_are_null_leave_the_defaults() -> None:
    llm = FakeLLM()
    ask({"prompt": "w5", "temperature": None, "n": None, "stop": None, "logprobs": None, "stream": None}, llm)
    assert llm.asked[0].params.temperature == 1.0
    assert llm.asked[0].params.stop == ()
