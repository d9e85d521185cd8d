"""Scripts of other sites call the server only where its operator allows their origin; and the version."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

import millpond
from millpond.errors import OptionError
from millpond.server.settings import ServerSettings
from tests.helpers.server.fake import FakeLLM, client_of

PAGE, OTHER = "https://chat.example.org", "https://evil.example.org"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-api-key"}
KEY = {"Authorization": "Bearer one"}


def send(
    method: str,
    path: str,
    origin: str | None,
    *,
    body: Any = None,
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> httpx.Response:
    async def work() -> httpx.Response:
        async with client_of(FakeLLM(), **settings) as client:
            own = {} if origin is None else {"Origin": origin}
            return await client.request(method, path, json=body, headers=own | (headers or {}))

    return asyncio.run(work())


def allowed(found: httpx.Response) -> str | None:
    return found.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/millpond/sessions"])
def test_a_preflight_needs_no_key(path: str) -> None:
    found = send("OPTIONS", path, PAGE, headers=ASKS, api_keys=("one",), cors_origins=(OTHER, PAGE))
    assert (found.status_code, allowed(found)) == (200, PAGE)
    assert found.headers["access-control-allow-headers"] == ASKS["Access-Control-Request-Headers"]
    assert "DELETE" in found.headers["access-control-allow-methods"]


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
def test_answers_and_refusals_can_be_read(origins: tuple[str, ...]) -> None:
    body = {"prompt": "w5", "max_tokens": 2}
    expected, keyed = origins[0], ("one",)
    for headers, status in ((KEY, 200), ({}, 401)):
        found = send("POST", "/v1/completions", PAGE, body=body, headers=headers, api_keys=keyed, cors_origins=origins)
        assert (found.status_code, allowed(found)) == (status, expected)
    streamed = send("POST", "/v1/completions", PAGE, body=body | {"stream": True}, cors_origins=origins)
    assert allowed(streamed) == expected
    assert "access-control-allow-credentials" not in streamed.headers
    assert allowed(send("POST", "/v1/completions", PAGE, body={"prompt": 5}, cors_origins=origins)) == expected


def test_other_origins_are_not_told_that_they_may() -> None:
    refused = send("OPTIONS", "/v1/completions", OTHER, headers=ASKS, cors_origins=(PAGE,))
    assert (refused.status_code, allowed(refused)) == (400, None)
    assert allowed(send("GET", "/v1/models", OTHER, cors_origins=(PAGE,))) is None


def test_without_the_option_nothing_is_said() -> None:
    assert allowed(send("GET", "/v1/models", PAGE)) is None
    assert send("OPTIONS", "/v1/completions", PAGE, headers=ASKS).status_code == 405


def test_foreign_host_names_are_refused_before_origins_are_looked_at() -> None:
    headers = ASKS | {"Host": "elsewhere"}
    found = send("OPTIONS", "/v1/completions", PAGE, headers=headers, cors_origins=("*",), allowed_hosts=("test",))
    assert found.status_code == 421


@pytest.mark.parametrize(
    "origin",
    [
        "chat.example.org",
        "https://",
        f"{PAGE}/",
        f"{PAGE}/chat",
        "https://Chat.example.org",
        "",
        "https://*.example.org",
        "https://user@example.org",
        f"{PAGE},{OTHER}",
        "x" * 10_000,
    ],
)
def test_what_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(OptionError, match=r"must be '\*'") as error:
        ServerSettings(cors_origins=(PAGE, origin))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("origin", ["*", PAGE, "http://localhost:3000", "vscode-webview://abc", "http://[::1]:80"])
def test_what_browsers_send(origin: str) -> None:
    assert ServerSettings(cors_origins=(origin,)).cors_origins == (origin,)


def test_the_version() -> None:
    assert send("GET", "/version", None).json() == {"version": millpond.__version__}
    assert send("GET", "/version", None, api_keys=("one",)).status_code == 401
