"""`millpond serve --pipeline 2`: the answers of one process over HTTP, streams, aborts, and what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

import millpond as mp
from millpond.cli.app import app
from tests.helpers.server.serving import Serving, serving

PROMPTS = [
    "anna kettle and rain may go on <ask> anna <is>",
    "rain may go on and anna kettle <ask> rain <is>",
    "the lake and anna kettle",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--pipeline", "2", "--method", "full", "--max-step-tokens", "64") as running:
        yield running
        children = psutil.Process(running._process.pid).children(recursive=True)
        (child,) = [one for one in children if "spawn_main" in str(one.cmdline())]
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the second process ends with the first"


def post(server: Serving, **body: Any) -> httpx.Response:
    body = {"model": "pond-recall", "max_tokens": 24, "temperature": 0, "ignore_eos": True} | body
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


@pytest.mark.slow
def test_answers_are_those_of_one_process(server: Serving) -> None:
    with mp.LLM("pond-recall", method="full", runner="modules", max_step_tokens=64) as llm:
        params = mp.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        expected = [output.completions[0].text for output in llm.generate(PROMPTS, params)]
    answer = post(server, prompt=PROMPTS)
    assert [choice["text"] for choice in answer.json()["choices"]] == expected
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True},
        timeout=120,
    ) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    parts = [json.loads(line)["choices"] for line in lines if line != "[DONE]"]
    assert len(parts) > 3, "it comes in parts"
    assert "".join(choices[0]["text"] for choices in parts if choices) == expected[0]


@pytest.mark.slow
def test_an_answer_that_nobody_reads_ends_in_both_processes(server: Serving) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 100_000, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    for _ in range(100):
        if "millpond_requests_running 0" in httpx.get(f"{server.url}/metrics").text:
            break
        time.sleep(0.1)
    else:
        pytest.fail(httpx.get(f"{server.url}/metrics").text)
    assert post(server, prompt=PROMPTS[2]).status_code == 200, "the next request finds both processes at the same step"
    refused = post(server, prompt=PROMPTS[0], millpond={"method": "pyramidkv", "budget": "30%"})
    assert refused.status_code == 400
    assert "method of a pipeline" in refused.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pipeline", "1"], "2"),
        (["--pipeline", "2", "--replicas", "2"], "leave one of the two out"),
        (["--pipeline", "2", "--memory", "1GiB"], "leave them out with --pipeline"),
        (["--pipeline", "2", "--method", "ada", "--budget", "30%"], "method of a pipeline"),
        (["--pipeline", "2", "--deterministic"], "deterministic=True"),
    ],
)
def test_what_does_not_go_together_is_refused(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code != 0
    assert said in " ".join((result.output + str(result.exception)).split())
