"""An engine that hangs or has ended is not healthy, and the server goes down all the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from millpond.errors import OptionError
from millpond.server.settings import ServerSettings
from tests.helpers.server.fake import FakeLLM
from tests.helpers.server.live import live, until

#: A server whose engine hangs in its first step.
HANGS = """
import threading
from tests.helpers.evals.small import tiny_model, tiny_tokenizer
from millpond.engine.async_llm import AsyncLLM
from millpond.server.uvicorn_server import run
from millpond.server.settings import ServerSettings
llm = AsyncLLM(tiny_model(), tokenizer=tiny_tokenizer(), budget=16)
llm._engine.step = lambda: threading.Event().wait()
run(llm, ServerSettings(drain_s=1.0, step_limit_s=0.5), port=0)
"""


def test_an_engine_that_hangs_is_not_healthy_and_is_logged(caplog: Any) -> None:
    with live(FakeLLM, step_limit_s=0.2) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        server.llm.hangs = "one step takes long"
        found = client.get("/health")
        assert (found.status_code, found.json()["reason"]) == (503, "one step takes long")
        refused = client.post("/v1/completions", json={"prompt": "w5"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stalled")
        assert "Retry-After" in refused.headers
        assert "millpond_engine_stalled 1.0" in client.get("/metrics").text
        assert "millpond_engine_step_age_seconds 12.5" in client.get("/metrics").text
        until(lambda: "one step takes long; /health says 503" in caplog.text)
        server.llm.hangs = None
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "w5"}).status_code == 200
        until(lambda: "the engine continues" in caplog.text)


@pytest.mark.slow
def test_a_server_whose_engine_hangs_goes_down_in_time() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", HANGS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            url = next(found[0] for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            reader = threading.Thread(target=process.stderr.read)
            reader.start()
            asked = threading.Thread(target=_post, args=(url,))
            asked.start()
            until(lambda: httpx.get(f"{url}/health", timeout=5).status_code == 503)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            assert time.monotonic() - began < 1.0 + 5.0
            asked.join(10)
            reader.join(10)
        finally:
            process.kill()


def _post(url: str) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json={"prompt": "w5 w6"}, timeout=30)


@pytest.mark.parametrize("bad", [{"step_limit_s": 0.0}, {"step_limit_s": float("nan")}, {"drain_s": float("inf")}])
def test_limits_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        ServerSettings(**bad)  # type: ignore[arg-type]
