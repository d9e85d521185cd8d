"""Nobody learns of others: not from errors, not by a web page's name for this machine, not from a repr."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import httpx
import pytest

from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.sampling.sampler import BadLogitsError
from millpond.server.app import create_app
from millpond.server.settings import ServerSettings
from millpond.server.usage import usage
from tests.helpers.evals.small import tiny_model
from tests.helpers.server.fake import FakeLLM


def test_errors_name_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "somebody" not in str(BadLogitsError([("somebody", 0), ("else", 0)]))
    engine = Engine(tiny_model(), method="full")
    for name in ("mine", "of-somebody"):
        engine.add(Request(request_id=name, prompt=(5, 6), params=SamplingParams(max_tokens=4)))

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("of-somebody")

    monkeypatch.setattr(engine._executor, "run", fail)
    ended = []
    with suppress(KeyError):  # a pass that fails for every request alone ends the engine
        while engine.busy:
            ended += [output for output in engine.step() if output.finished]
    ended += [output for output in engine.step() if output.finished]
    assert len(ended) == 2
    for output in ended:
        assert output.error is not None
        others = {"mine", "of-somebody"} - {output.request_id}
        assert not any(name in str(output.error) for name in others)
        assert "KeyError" in str(output.error)
        assert isinstance(output.error.__cause__, KeyError)
    engine.close()


def get(host: str, at: str, **settings: Any) -> httpx.Response:
    async def work() -> httpx.Response:
        app = create_app(FakeLLM(), ServerSettings(**settings))

        async def listening(scope: Any, receive: Any, send: Any) -> None:
            await app(scope | {"server": (at, 8000)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(listening), base_url="http://x") as client:
            return await client.get("/health", headers={"Host": host})

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("host", "at", "settings", "status"),
    [
        ("evil.example", "127.0.0.1", {}, 421),
        ("evil.example:8000", "::1", {}, 421),
        ("localhost.evil.example", "127.0.0.1", {}, 421),
        ("127.0.0.1.evil.example", "127.0.0.1", {}, 421),
        ("", "127.0.0.1", {}, 421),
        ("localhost:8000", "127.0.0.1", {}, 200),
        ("127.0.0.1:8000", "127.0.0.1", {}, 200),
        ("[::1]:8000", "::1", {}, 200),
        ("[::1]", "::1", {}, 200),
        ("mine.example", "127.0.0.1", {"allowed_hosts": ("Mine.example",)}, 200),
        ("evil.example", "127.0.0.1", {"allowed_hosts": ("mine.example",)}, 421),
        ("evil.example", "10.0.0.1", {"allowed_hosts": ("mine.example",)}, 421),
        ("other.example", "10.0.0.1", {}, 200),
        ("other.example", "127.0.0.1", {"api_keys": ("one",)}, 200),
    ],
)
def test_hosts(host: str, at: str, settings: dict[str, Any], status: int) -> None:
    assert get(host, at, **settings).status_code == status


def test_settings_show_no_keys() -> None:
    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))


@pytest.mark.parametrize("new", [1, 4])
def test_cached_tokens_are_told_however_short_the_answer(new: int) -> None:
    engine = Engine(tiny_model(), method="full", prefix_cache=True, page_slots=4)
    prompt = tuple(2 + 7 * place % 90 for place in range(40))
    found = []
    for name in ("first", "second"):
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        engine.add(Request(request_id=name, prompt=prompt, params=params, cache=CacheOptions()))
        found += [usage([output])["prompt_tokens_details"]["cached_tokens"] for output in engine.drain()]
    assert found[0] == 0
    assert found[1] >= 32
    engine.close()
