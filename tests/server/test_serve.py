"""`millpond serve`: from the command line to an answer, and down again."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import millpond.server.uvicorn_server
from millpond.cli.app import app
from millpond.cli.serve import summary
from millpond.install_command import install_command
from millpond.server.request_log import LOG
from millpond.server.settings import ServerSettings
from tests.helpers.server.fake import FakeLLM


@pytest.fixture(autouse=True)
def _no_lines_behind_a_test() -> Iterator[None]:
    """The command line has the log of requests written to its stderr, which is gone when it ends."""
    ours = logging.getLogger("millpond")
    handlers, level = ours.handlers[:], LOG.level
    yield
    ours.handlers[:] = handlers
    LOG.setLevel(level)


def test_it_serves_and_goes_down_with_nothing_lost() -> None:
    command = [
        sys.executable,
        "-m",
        "millpond",
        "serve",
        "--port",
        "0",
        "--threads",
        "1",
        "--kv-memory",
        "64MiB",
        "--budget",
        "32",
        "--api-key",
        "one",
    ]
    environment = os.environ | {"MILLPOND_API_KEYS": "two, three", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            told = []
            for line in process.stderr:
                told.append(line)
                if line.startswith("key"):
                    break
            said = "".join(told)
            assert told[0] == "loading  pond-recall\n", "before anything else: it may last"
            assert "model    pond-recall, 8.0 MiB of weights, context of 8,192 tokens" in said
            assert "method h2o, budget 32, format auto; memory for keys and values: at most 64.0 MiB" in said
            assert "key      one of 3 is needed" in said
            url = re.findall(r"page     (http://127\.0\.0\.1:\d+)/", said)[0]
            found: list[httpx.Response] = []
            body = {"prompt": "berta melon saddle " * 20, "max_tokens": 200, "ignore_eos": True}
            with httpx.Client(base_url=url, headers={"Authorization": "Bearer three"}, timeout=60) as client:
                assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401
                assert client.get("/v1/models").json()["data"][0]["id"] == "pond-recall"
                assert client.get("/metrics").text.startswith("# HELP millpond_")
                asked = threading.Thread(target=lambda: found.append(client.post("/v1/completions", json=body)))
                asked.start()
                while (
                    "millpond_requests_running 1.0"
                    not in httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer one"}, timeout=60).text
                ):
                    assert asked.is_alive()
                process.send_signal(signal.SIGTERM)
                asked.join(60)
            assert found[0].json()["usage"]["completion_tokens"] == 200
            lines = [line for line in process.stderr if line[20:].startswith(("GET", "POST"))]
            assert [re.sub(r", .*", "", line[20:].strip()) for line in lines] == [
                "GET (no route) 401 invalid_api_key",
                "GET /v1/models 200",
                "POST /v1/completions 200",  # refused before it has a route
            ]
            assert "prompt tokens (0 cached), 200 generated, first token after" in lines[-1]
            assert process.wait(60) == -signal.SIGTERM  # uvicorn hands the signal on when it is done
        finally:
            process.kill()


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "pond-recal"], "did you mean 'pond-recall'"),
        (["--method", "h20"], "did you mean 'h2o'"),
        (["--method", "full", "--budget", "20%"], "takes no budget"),
        (["--option", "recent"], "must read name=value"),
        (["--codec", "int99"], "int99"),
        (["--kv-memory", "much"], "'much' is not an amount of bytes"),
        (["--model", "/nowhere/model"], "there is no such folder or file"),
        (["--max-body", "0"], "must be 1 to"),
        (["--timeout", "0"], "must be above 0"),
        (["--api-key", " "], "an API key is empty"),
        (["--handoff-memory", "1MiB"], "--handoff-memory needs --replicas"),
        (["--replicas", "2", "--memory", "1GiB"], "leave them out with workers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_served_is_one_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(millpond.server.uvicorn_server, "run", lambda *_, **__: pytest.fail("it serves"))
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_port_in_use_is_told_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.engine.async_llm.AsyncLLM", lambda *_, **__: pytest.fail("it loads a model"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = invoke("--port", str(port))
    assert done.exit_code == 2
    assert f"port {port} of 127.0.0.1 is in use; name another, or 0 for a free one" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EADDRNOTAVAIL, "host 127.0.0.1 is no address of this machine; name one, or 0.0.0.0 for all of them"),
        (errno.EACCES, "port 80 of 127.0.0.1 is for the administrator; name one from 1024 on"),
    ],
)
def test_an_address_that_cannot_be_had_is_told_before_a_model_is_loaded(
    number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr("millpond.engine.async_llm.AsyncLLM", lambda *_, **__: pytest.fail("it loads a model"))
    monkeypatch.setattr("socket.socket.bind", refused)
    done = invoke("--port", "80")
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())


def test_options_reach_the_engine_and_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(llm: Any, settings: Any, **where: Any) -> None:
        seen.update(llm=llm, settings=settings, **where)

    monkeypatch.setattr(millpond.server.uvicorn_server, "run", run)
    monkeypatch.setenv("MILLPOND_API_KEYS", "two")
    done = invoke(
        "--method",
        "tova",
        "--budget",
        "64",
        "--codec",
        "bf16",
        "--kv-memory",
        "32MiB",
        "--served-name",
        "mine",
        "--host",
        "0.0.0.0",
        "--port",
        "81",
        "--max-queue",
        "3",
        "--max-tokens",
        "9",
        "--max-body",
        "1MiB",
        "--timeout",
        "4",
        "--drain",
        "2",
        "--api-key",
        "one",
        "--runner",
        "modules",
    )
    assert done.exit_code == 0, done.output
    llm, settings = seen["llm"], seen["settings"]
    assert (llm.model_name, llm.cache.method, llm.cache.budget, llm.cache.codec) == ("mine", "tova", "64", "bf16")
    assert llm.stats().kv_limit == 32 * 2**20
    assert llm._engine._model.runner == "modules"
    assert (seen["host"], seen["port"]) == ("0.0.0.0", 81)
    assert (settings.api_keys, settings.max_queue, settings.max_tokens) == (("one", "two"), 3, 9)
    assert (settings.max_body_bytes, settings.timeout_s, settings.drain_s) == (2**20, 4.0, 2.0)
    assert "anyone" not in done.stderr


@pytest.mark.parametrize("quiet", [False, True])
def test_lines_of_requests_can_be_left_out(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    LOG.setLevel(logging.NOTSET)
    monkeypatch.setattr(millpond.server.uvicorn_server, "run", lambda *_, **__: None)
    assert invoke(*(["--quiet"] if quiet else [])).exit_code == 0
    assert LOG.isEnabledFor(logging.INFO) is not quiet


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("0.0.0.0", "http://127.0.0.1:81/v1, and at every other address"),
        ("::1", "http://[::1]:81/v1"),
        ("pond.example.org", "http://pond.example.org:81/v1"),
    ],
)
def test_the_address_is_one_that_can_be_opened(host: str, shown: str) -> None:
    lines = summary(FakeLLM(), ServerSettings(), host, 81)
    assert any(shown in line for line in lines)
    assert "at most 3.9 KiB" in lines[1]
    assert lines[-2].startswith("turns    none are stored")


def test_workers_take_the_place_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Cluster:
        def __init__(self, model: str, config: Any, **options: Any) -> None:
            seen.update(model=model, config=config, **options)

    monkeypatch.setattr("millpond.cluster.async_llm.AsyncClusterLLM", Cluster)
    monkeypatch.setattr(millpond.server.uvicorn_server, "run", lambda llm, *_, **__: seen.update(llm=llm))
    layout = ["--prefill", "1", "--decode", "2", "--handoff-memory", "8MiB", "--threads", "1"]
    done = invoke("--method", "tova", "--budget", "64", "--kv-memory", "32MiB", *layout)
    assert done.exit_code == 0, done.output
    assert isinstance(seen["llm"], Cluster)
    assert (seen["model"], seen["model_name"], seen["threads"]) == ("pond-recall", "pond-recall", 1)
    assert (seen["prefill"], seen["decode"], seen["replicas"], seen["address"]) == (1, 2, None, None)
    assert seen["handoff_memory"] == "8MiB"
    assert (seen["config"].method, seen["config"].kv_memory) == ("tova", 32 * 2**20)


def test_a_plan_says_how_many_workers_do_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Cluster:
        def __init__(self, model: str, config: Any, **options: Any) -> None:
            seen.update(options)

    monkeypatch.setattr("millpond.cluster.async_llm.AsyncClusterLLM", Cluster)
    monkeypatch.setattr(millpond.server.uvicorn_server, "run", lambda *_, **__: None)
    monkeypatch.setattr("millpond.cli.serve.usable_cpus", lambda: 3)
    plan = tmp_path / "plan.json"

    def serve(workers: list[tuple[str, int]], *options: str) -> Any:
        listed = [{"role": role, "devices": devices} for role, devices in workers]
        plan.write_text(json.dumps({"format": 1, "workers": listed}), encoding="utf-8")
        return invoke("--layout", str(plan), *options)

    split = [("prefill", 1), ("decode", 1), ("decode", 1)]
    done = serve(split, "--threads", "1")
    assert done.exit_code == 0, done.output
    assert (seen["replicas"], seen["prefill"], seen["decode"]) == (None, 1, 2)
    assert serve([("both", 1)]).exit_code == 0
    assert (seen["replicas"], seen["prefill"], seen["decode"]) == (1, None, None)
    seen.clear()
    for workers, options, words in [
        (split, ["--threads", "2"], "3 workers of 2 threads, and this machine has 3 CPUs"),
        ([("both", 2)], [], "workers of 2 devices"),
        (split, ["--decode", "2"], "leave --decode out"),
        ([("prefill", 1)], [], "workers do both, or some read"),
    ]:
        refused = serve(workers, *options)
        assert (refused.exit_code, words in " ".join(refused.stderr.split())) == (2, True), refused.stderr
    assert seen == {}
    assert serve(split, "--threads", "2", "--address", "auto").exit_code == 0, "Ray places them elsewhere"


def test_an_open_server_is_worth_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(millpond.server.uvicorn_server, "run", lambda *_, **__: None)
    assert "anyone who can reach 0.0.0.0 may use the model" in " ".join(invoke("--host", "0.0.0.0").stderr.split())


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "millpond.server.uvicorn_server")
    done = invoke()
    assert done.exit_code == 2
    assert install_command("server") in done.stderr
