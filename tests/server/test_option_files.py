"""Over HTTP options name files that the operator listed, and nothing else; whatever they say, others go on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from millpond.engine.async_llm import AsyncLLM
from millpond.errors import OptionError
from millpond.server.app import create_app
from millpond.server.settings import ServerSettings
from tests.helpers.evals.small import tiny_model, tiny_tokenizer
from tests.helpers.server.fake import FakeLLM
from tests.helpers.server.live import Live, live

BODY = {"prompt": "w5 w6 w7", "max_tokens": 2, "temperature": 0}


def engine(**options: Any) -> AsyncLLM:
    return AsyncLLM(tiny_model(), tokenizer=tiny_tokenizer(), **{"method": "h2o", "budget": 16} | options)


def ask(server: Live, method: str | None = None, **options: Any) -> Any:
    kept = {"options": options} | ({"method": method} if method else {})
    with server.client() as client:
        return client.post("/v1/completions", json=BODY | {"millpond": kept})


def test_paths_are_refused_alike_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a "/" in a path would end an option inside an option
    Path("there.json").write_text("[[1, 0], [1, 0]]")
    os.mkfifo("pipe")
    with live(engine) as server:
        for method, option in (("duo_attention", "heads"), ("qfilters", "filters"), ("minference", "patterns")):
            messages = set()
            for path in ("there.json", "none.json", "pipe", "/dev/zero", "/etc/passwd"):
                asked = [ask(server, method, **{option: path})]
                if "/" not in path:
                    asked.append(ask(server, "pyramidkv", score=f"{method}/{option}={path}"))
                for found in asked:
                    assert found.status_code == 400
                    assert path not in found.text
                    messages.add(found.json()["error"]["message"])
            assert len(messages) == 1
            assert "it listed none" in messages.pop()
        assert ask(server).status_code == 200


def test_listed_names_and_the_operators_own_files_work(tmp_path: Path) -> None:
    heads = tmp_path / "heads.json"
    heads.write_text(json.dumps([[1, 0], [0, 1]]))
    own = {"method": "duo_attention", "options": {"heads": str(heads), "sinks": 1, "recent": 2}}
    with live(lambda: engine(**own), option_files={"gates": heads}) as server:
        heads.unlink()
        for found in (
            ask(server),
            ask(server, recent=3),
            ask(server, "duo_attention", heads="gates", sinks=1, recent=2),
            ask(server, "pyramidkv", score="duo_attention/heads=gates/sinks=1/recent=2"),
        ):
            assert found.status_code in (200, 400), found.text
            assert "names a file" not in found.text
        assert ask(server, "duo_attention", heads="gates", sinks=1, recent=2).status_code == 200
        assert ask(server, "duo_attention", heads=str(heads)).status_code == 400
        with server.client() as client:
            assert client.get("/v1/models").json()["data"][0]["millpond"]["options"]["heads"] == "heads.json"


@pytest.mark.parametrize("method", ["duo_attention", "pyramidkv"])
def test_a_request_may_change_what_stands_beside_the_operators_own_file(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = tmp_path / "heads.json"
    heads.write_text(json.dumps([[1, 0], [0, 1]]))
    nested = f"duo_attention/heads={heads}/sinks=1/recent=2"
    options = {"heads": str(heads), "sinks": 1, "recent": 2} if method == "duo_attention" else {"score": nested}
    beside: dict[str, Any] = {"recent": 3} if method == "duo_attention" else {"beta": 10}
    with live(lambda: engine(method=method, options=options, budget=24)) as server:
        heads.unlink()  # it was read before
        with server.client() as client:
            beside_all = [
                {},
                {"budget": 20},
                {"options": beside},
                {"options": beside, "budget": 20},
                {"method": method},
            ]
            for kept in beside_all:
                answer = client.post("/v1/completions", json=BODY | {"millpond": kept})
                assert answer.status_code == 200, answer.text
            taken = {"options": beside | options, "budget": 20}  # as the operator has it, which is not the client's
            refused = client.post("/v1/completions", json=BODY | {"millpond": taken})
            assert refused.status_code == 400
            assert "names a file" in refused.text
            assert str(tmp_path) not in refused.text + client.get("/v1/models").text
        assert ask(server, "duo_attention", heads=str(heads)).status_code == 400


def test_files_that_cannot_be_read_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no regular file"):
        create_app(FakeLLM(), ServerSettings(option_files={"zero": "/dev/zero"}))
    with pytest.raises(OptionError, match="none"):
        engine(method="duo_attention", options={"heads": str(tmp_path / "none")})
    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))
