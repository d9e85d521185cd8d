"""Faults in the work of one request: it is answered with 500 and its id, and the others are answered."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from millpond.engine import step_executor
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.detokenizer import Writer
from tests.helpers.evals.small import tiny_model, tiny_tokenizer
from tests.helpers.server.live import Live, live, until

#: Prompts, of which the second fails.
TEXTS = ("w5 w6 w7", "w9 w9 w9 w9", "w7 w5", "w6 w6 w5")
POISON = 1


def make() -> AsyncLLM:
    model = copy.deepcopy(tiny_model()).float().eval()
    for module in model.modules():  # other tests share the model, and may still hold caches with hooks on it
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return AsyncLLM(model, tokenizer=tiny_tokenizer(), method="full", deterministic=True, model_name="m")


def ask(server: Live) -> list[Any]:
    """The answers to all prompts, sent together."""

    def one(text: str) -> Any:
        body = {"model": "m", "prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        with server.client() as client:
            return client.post("/v1/completions", json=body)

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        return list(pool.map(one, TEXTS))


def choices(answer: Any) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize("place", ["pass", "text"])
def test_a_fault_is_answered_with_500_and_the_others_go_on(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poison = tiny_tokenizer()(TEXTS[POISON])["input_ids"]
    with live(make) as server:
        undisturbed = [choices(answer) for answer in ask(server)]
        engine = server.llm._engine

        def fails(names: Any) -> bool:
            return any(list(engine._requests[name].ids) == poison for name in names if name in engine._requests)

        real, add = step_executor.run, Writer.add

        def failing(model: Any, groups: Any, readings: Any) -> Any:
            found = real(model, groups, readings)
            if fails({completion.key[0] for group in groups for completion in group.completions}):
                raise RuntimeError("planted")
            return found

        def failing_add(self: Writer, token: int) -> Any:
            found = add(self, token)
            own = [state.request.request_id for state in engine._requests if state.completions[0]._writer is self]
            if fails(own):
                raise RuntimeError("planted")
            return found

        with monkeypatch.context() as patch:
            if place == "pass":
                patch.setattr(step_executor, "run", failing)
            else:
                patch.setattr(Writer, "add", failing_add)
            found = ask(server)
        failed = found[POISON]
        assert failed.status_code == 500
        error = failed.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_failed")
        assert "failed with RuntimeError" in error["message"]
        name = error["message"].split("'")[1]
        assert any(name in record.getMessage() and record.exc_info for record in caplog.records), "no traceback"
        for index, answer in enumerate(found):
            if index != POISON:
                assert choices(answer) == undisturbed[index]
        with server.client() as client:
            assert client.get("/health").status_code == 200
        assert [choices(answer) for answer in ask(server)] == undisturbed


def test_what_fails_for_every_request_is_in_health(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(make) as server:

        def failing(*_: Any) -> Any:
            raise RuntimeError("planted")

        monkeypatch.setattr(step_executor, "run", failing)
        assert {answer.status_code for answer in ask(server)} <= {500, 503}
        with server.client() as client:
            until(lambda: ask(server)[0].status_code and client.get("/health").status_code == 503)
            assert "ended with RuntimeError" in client.get("/health").json()["reason"]
