"""lm-evaluation-harness through HTTP, as any server is asked, beside the same model in its own process."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.engine.async_llm import AsyncLLM
from tests.helpers.evals.small import save_tiny, text, tiny_model, tiny_tokenizer
from tests.helpers.server.live import Live, live

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None or importlib.util.find_spec("tenacity") is None,
        reason="lm-evaluation-harness is not installed with its API models (lm-eval[api])",
    ),
    pytest.mark.filterwarnings("ignore"),  # its own
]
PROMPTS = [text(length, length) for length in (40, 25, 31)]
UNTIL = {"until": ["w5"], "max_gen_toks": 12, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Live]:
    """What is served keeps what `request.param` says."""
    with live(
        lambda: AsyncLLM(tiny_model(), tokenizer=tiny_tokenizer(), model_name="tiny", kv_memory="1MiB", **request.param)
    ) as running:
        yield running


def through_http(server: Live, folder: str) -> Any:
    """The model that lm-eval has for OpenAI-compatible servers."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="tiny",
        tokenizer=folder,
        num_concurrent=2,
        max_retries=1,
        add_bos_token=True,
    )


def asked(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


@pytest.mark.parametrize("server", [{"method": "full"}], indirect=True)
def test_scores_and_answers_are_those_of_the_model_in_process(server: Live, folder: str) -> None:
    from millpond_lab.evals.adapters.lm_eval import MillpondLM

    there, here = through_http(server, folder), MillpondLM(folder, "full", device="cpu", batch_size=2)
    says = asked("generate_until", [(prompt, UNTIL) for prompt in PROMPTS])
    answers = there.generate_until(says, disable_tqdm=True)
    assert [one.split() for one in answers] == [one.split() for one in here.generate_until(says)]
    pairs = asked("loglikelihood", [(PROMPTS[0], " w7 w8 w9"), (PROMPTS[0], " w11"), (PROMPTS[1], " w3 w5")])
    theirs = there.loglikelihood(pairs, disable_tqdm=True)
    for (got, greedy), (want, best) in zip(theirs, here.loglikelihood(pairs), strict=True):
        assert got == pytest.approx(want, abs=1e-4)
        assert greedy == best


@pytest.mark.parametrize("server", [{"method": "h2o", "budget": 16}], indirect=True)
def test_answers_of_an_evicting_method_are_those_of_generate(server: Live, folder: str) -> None:
    answers = through_http(server, folder).generate_until(
        asked("generate_until", [(prompt, UNTIL) for prompt in PROMPTS]), disable_tqdm=True
    )
    model, tokenizer = tiny_model(), tiny_tokenizer()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with mp.compress(model, "h2o", 16) as cache:
            out = model.generate(ids, cache=cache, max_new_tokens=12, do_sample=False)
        said = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer.split() == said.partition("w5")[0].split()
