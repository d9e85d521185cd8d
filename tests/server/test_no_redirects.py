"""No address stands for another: with a slash too many a request is not found, whatever it would do without."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from millpond.server.app import create_app
from millpond.server.settings import ServerSettings
from tests.helpers.server.fake import FakeLLM, client_of
from tests.helpers.server.fake_cluster import FakeCluster
from tests.helpers.server.routes import all_routes

STRANGE = "evil.example"


def addresses(path: str) -> set[str]:
    """With a slash behind it, and without what stands in its last part."""
    return {re.sub(r"\{\w+\}", "x", path) + "/", re.sub(r"\{\w+\}$", "", path)} - {path, "//"}


@pytest.mark.parametrize("keys", [(), ("one",)])
def test_no_route_redirects(keys: tuple[str, ...]) -> None:
    async def work() -> None:
        cluster = FakeCluster()
        settings: dict[str, Any] = {"api_keys": keys, "allowed_hosts": (STRANGE,)}
        async with client_of(cluster, **settings) as client:
            headers = {"Host": STRANGE, "Authorization": "Bearer one", "Content-Type": "application/json"}
            found = sorted(all_routes(create_app(cluster)))
            assert len(found) > 20, found
            for path, method in found:
                for address in addresses(path):
                    answer = await client.request(method.upper(), address, headers=headers, content=b"{}")
                    assert answer.status_code in (401, 404, 405), f"{method} {address}: {answer.status_code}"
                    assert "location" not in answer.headers, f"{method} {address}: {answer.headers['location']}"
                    assert STRANGE not in answer.text
        assert cluster.drained == []

    asyncio.run(work())


def test_a_slash_does_not_remove_all_sessions() -> None:
    async def work() -> None:
        async with client_of(FakeLLM()) as client:
            for method, path in (("DELETE", "/v1/millpond/sessions/"), ("GET", "/v1/models/"), ("GET", "/health/")):
                answer = await client.request(method, path)
                assert answer.status_code == 404, path
                assert answer.json()["error"]["code"] in ("not_found", "model_not_found"), path
            assert (await client.get("/v1/models")).status_code == 200

    asyncio.run(work())


def test_what_an_app_is_made_of_redirects_nothing() -> None:
    assert create_app(FakeLLM(), ServerSettings()).router.redirect_slashes is False
