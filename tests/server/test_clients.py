"""Who asks: told apart by key or address, with priorities and shared prompts of their own, and a place in the queue."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from millpond.cli.serve import limits_of
from millpond.engine.request import Request
from millpond.errors import OptionError
from millpond.server.admission import AdmissionControl
from millpond.server.app import create_app
from millpond.server.errors import ApiError
from millpond.server.settings import ServerSettings
from tests.helpers.server.fake import FakeLLM
from tests.helpers.server.live import live

KEYS = ("alice-key", "bob-kéy")


class Door:
    """A server, and who sends to it."""

    def __init__(self, **settings: Any) -> None:
        self.llm = FakeLLM()
        self.app = create_app(self.llm, ServerSettings(**settings))

    def send(self, key: str | None = None, address: str = "10.0.0.1", **body: Any) -> httpx.Response:
        async def work() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, client=(address, 4000))
            headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
            async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers) as client:
                return await client.post("/v1/completions", json={"prompt": "w5", "max_tokens": 1} | body)

        return asyncio.run(work())

    def asked(self, *args: Any, **body: Any) -> Request:
        """What reaches the engine."""
        assert self.send(*args, **body).status_code == 200
        return self.llm.asked[-1]


def test_clients_are_told_apart_by_key_whatever_their_address() -> None:
    door = Door(api_keys=KEYS)
    names = {door.asked(key, address).client for key in KEYS for address in ("10.0.0.1", "10.0.0.2")}
    assert len(names) == 2
    assert not any(key in repr(request) for request in door.llm.asked for key in KEYS)


def test_without_keys_clients_are_told_apart_by_address() -> None:
    door = Door()
    name = door.asked().client
    assert door.asked(None, "10.0.0.1").client == name
    assert door.asked("whatever", "10.0.0.1").client == name, "a key that nobody checks names nobody"
    assert door.asked(None, "10.0.0.2").client != name


def test_one_network_of_ipv6_is_one_client() -> None:
    door = Door()
    assert door.asked(None, "2001:db8:0:1::1").client == door.asked(None, "2001:db8:0:1:ffff::2").client
    assert door.asked(None, "2001:db8:0:2::1").client != door.asked(None, "2001:db8:0:1::1").client
    assert door.asked(None, "::ffff:10.0.0.1").client == door.asked(None, "10.0.0.1").client


def test_each_key_shares_prompts_with_itself_alone() -> None:
    door = Door(api_keys=KEYS)
    alice, bob = (door.asked(key).cache_salt for key in KEYS)
    assert alice is not None
    assert alice != bob
    assert door.asked(KEYS[0]).cache_salt == alice
    salted = {door.asked(key, cache_salt=salt).cache_salt for key in KEYS for salt in ("x", "y", alice)}
    assert len(salted | {alice, bob}) == 8, "a salt parts what a key shares, and never joins two keys"
    assert Door(api_keys=KEYS).asked(KEYS[0]).cache_salt != alice, "hashed with a secret of the process"


def test_without_keys_all_share_but_for_what_is_salted() -> None:
    door = Door()
    assert door.asked(None, "10.0.0.1").cache_salt is door.asked(None, "10.0.0.2").cache_salt is None
    one = door.asked(None, "10.0.0.1", cache_salt="x").cache_salt
    assert one == door.asked(None, "10.0.0.2", cache_salt="x").cache_salt
    assert one not in (None, "x", door.asked(cache_salt="y").cache_salt)


@pytest.mark.parametrize("salt", ["", "x" * 257, 5, ["x"]])
def test_a_salt_is_a_short_text(salt: Any) -> None:
    refused = Door().send(cache_salt=salt)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


def test_nobody_overtakes_by_saying_so() -> None:
    door = Door(api_keys=KEYS, priority_limits={KEYS[1]: -5})
    assert door.asked(KEYS[0], millpond={"priority": 3}).priority == 3
    assert door.asked(KEYS[1], millpond={"priority": -5}).priority == -5
    for key, priority, limit in ((KEYS[0], -1, 0), (KEYS[1], -6, -5)):
        for stream in (False, True):
            refused = door.send(key, millpond={"priority": priority}, stream=stream)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (403, "priority_not_allowed")
            assert (
                f"priority={priority}: lower goes first, and you may ask for {limit} at the lowest" in error["message"]
            )
    assert len(door.llm.asked) == 2


def test_the_operator_says_what_all_others_may_ask_for() -> None:
    door = Door(priority_limits={"": -2})
    assert door.asked(millpond={"priority": -2}).priority == -2
    assert door.send(millpond={"priority": -3}).status_code == 403


def test_limits_are_for_keys_that_there_are() -> None:
    with pytest.raises(OptionError, match="1 of its keys are not among api_keys") as refused:
        ServerSettings(api_keys=("one",), priority_limits={"other": -1})
    assert "'other'" not in str(refused.value)


def test_limits_on_the_command_line() -> None:
    assert limits_of(["a=b=-3", "1"]) == {"a=b": -3, "": 1}
    with pytest.raises(OptionError, match=r"--priority-limit KEY=\.\.\.: must be a whole number"):
        limits_of(["secret=x"])


def test_the_end_of_the_queue_is_for_those_who_have_nothing_in_it() -> None:
    llm = FakeLLM()
    llm.open.clear()
    gate = AdmissionControl(llm, 16)
    with gate.admit([str(n) for n in range(14)], "many"):
        full = "14 prompts wait and the queue holds 14 for you"
        with pytest.raises(ApiError, match=full), gate.admit(["x"], "many"):
            pass
        with gate.admit(["y"], "one"), pytest.raises(ApiError), gate.admit(["z"], "one"):
            pass
    with gate.admit([str(n) for n in range(16)], "many"):
        assert gate.waiting == 16


@pytest.mark.parametrize(
    ("proxies", "sent", "client"),
    [
        ((), "10.9.9.9", "127.0.0.1"),
        (("10.0.0.0/8",), "10.9.9.9", "127.0.0.1"),
        (("127.0.0.1",), "10.9.9.9", "10.9.9.9"),
        (("127.0.0.1",), "1.2.3.4, 10.9.9.9", "10.9.9.9"),
        (("127.0.0.0/8", "10.9.9.0/24"), "1.2.3.4, 10.9.9.9", "1.2.3.4"),
        (("127.0.0.1",), None, "127.0.0.1"),
    ],
)
def test_nobody_chooses_its_address_but_through_a_trusted_proxy(
    proxies: tuple[str, ...], sent: str | None, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # the server's own settings decide, not those of uvicorn
    with live(FakeLLM, trusted_proxies=proxies) as server, server.client() as own:
        headers = {} if sent is None else {"X-Forwarded-For": sent}
        assert own.post("/v1/completions", json={"prompt": "w5", "max_tokens": 1}, headers=headers).status_code == 200
        assert server.llm.asked[-1].client == client


@pytest.mark.parametrize("proxy", ["*", "proxy.local", "10.0.0.1/8", ""])
def test_a_trusted_proxy_is_an_address_or_a_network(proxy: str) -> None:
    with pytest.raises(OptionError, match="must be an address"):
        ServerSettings(trusted_proxies=(proxy,))
