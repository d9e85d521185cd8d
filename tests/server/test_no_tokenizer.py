"""A model folder without a tokenizer: token ids in, token ids out, in the library and over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen2Config

import millpond as mp
from millpond.cli.chat_backend import LocalBackend
from millpond.engine.async_llm import AsyncLLM
from millpond.errors import OptionError
from millpond.models.load import find_tokenizer
from server.test_completions import events
from tests.helpers.evals.small import WORDS, tiny_model, tiny_tokenizer
from tests.helpers.server.live import Live, live

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bare")
    tiny_model().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with live(lambda: AsyncLLM(str(folder), model_name="bare", method="full")) as running:
        yield running


def post(server: Live, path: str, body: dict[str, Any]) -> Any:
    with server.client() as client:
        return client.post(path, json=body)


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    """transformers makes one for Qwen2 that turns every text to nothing."""
    Qwen2Config().save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("some text") == []
    assert find_tokenizer(tmp_path) is None
    tiny_tokenizer().save_pretrained(tmp_path)
    assert find_tokenizer(tmp_path) is not None
    assert find_tokenizer("pond-recall") is not None


def test_the_library_takes_token_ids(folder: Path) -> None:
    params = mp.SamplingParams(max_tokens=6, temperature=0)
    with mp.LLM(str(folder), method="full") as llm:
        (answer,) = llm.generate([PROMPT], params)
        with pytest.raises(OptionError, match="text needs a tokenizer; give token ids"):
            llm.generate("w5 w6", params)
        with pytest.raises(OptionError, match="stop texts need a tokenizer"):
            llm.generate([PROMPT], mp.SamplingParams(stop=("w5",)))
    with mp.LLM(tiny_model(), tokenizer=tiny_tokenizer(), method="full") as llm:
        (same,) = llm.generate([PROMPT], params)
    assert answer.completions[0].token_ids == same.completions[0].token_ids
    assert answer.completions[0].text == ""


def test_a_chat_in_the_terminal_is_refused(folder: Path) -> None:
    with mp.LLM(str(folder), method="full") as llm, pytest.raises(OptionError, match="has no tokenizer"):
        LocalBackend(llm, mp.SamplingParams(), "bare")


def test_the_server_answers_token_ids_with_token_ids(server: Live) -> None:
    with mp.LLM(tiny_model(), method="full") as llm:
        (alone,) = llm.generate([PROMPT], mp.SamplingParams(max_tokens=6, temperature=0))
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 2, "echo": True}
    (choice,) = post(server, "/v1/completions", body).json()["choices"]
    assert choice["text"] == ""
    assert choice["token_ids"] == list(alone.completions[0].token_ids)
    told = choice["logprobs"]
    assert told["tokens"] == [f"token_id:{i}" for i in [*PROMPT, *choice["token_ids"]]]
    assert all(len(top) >= 2 for top in told["top_logprobs"][1:])
    pieces = events(post(server, "/v1/completions", body | {"stream": True}).text)
    assert [i for piece in pieces for i in piece["choices"][0]["token_ids"]] == choice["token_ids"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "w5"}),
        ("/v1/completions", {"prompt": ["w5"]}),
        ("/v1/completions", {"prompt": PROMPT, "stop": "w5"}),
        ("/v1/completions", {"prompt": PROMPT, "bad_words": ["w5"]}),
        ("/v1/responses", {"input": "w5"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5"}]}),
        ("/tokenize", {"prompt": "w5"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_what_needs_texts_is_refused(server: Live, path: str, body: dict[str, Any]) -> None:
    refused = post(server, path, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_tokenizer"), refused.text
    assert "token ids" in refused.json()["error"]["message"]


def test_the_server_says_that_there_is_none(server: Live) -> None:
    with server.client() as client:
        told = client.get("/v1/models").json()["data"][0]["millpond"]
    assert (told["tokenizer"], told["chat_template"]) == (False, None)


def test_a_model_with_a_tokenizer_tells_no_ids() -> None:
    from server.test_completions import ask
    from tests.helpers.server.fake import FakeLLM

    (choice,) = ask({"prompt": WORDS[5]}, FakeLLM(), "/v1/completions").json()["choices"]
    assert "token_ids" not in choice
