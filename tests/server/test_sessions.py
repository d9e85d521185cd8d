"""Stored turns over HTTP: continued after a restart by the same key alone, listed and removed by it alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

import millpond as mp
from millpond.server.app import create_app
from millpond.server.settings import ServerSettings
from tests.helpers.server.fake import FakeLLM, client_of

BEGIN = "the quiet rain past the meadow and old stone on the river anna kettle and some old rain"
MORE = " and the old stone <ask> anna <is>"
KEYS = ("one", "two")


def served(
    folder: Path | None, work: Callable[[httpx.AsyncClient], Awaitable[None]], keys: tuple[str, ...] = ()
) -> None:
    """Run `work` with a server that opens the folder, and closes it."""

    async def run() -> None:
        llm = mp.AsyncLLM("pond-recall", method="h2o", budget="50%", dtype="f32", cache_dir=folder)
        app = create_app(llm, ServerSettings(api_keys=keys))
        try:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                await work(client)
        finally:
            await llm.close()

    asyncio.run(run())


def as_key(key: str, salt: str | None = None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} | ({} if salt is None else {"Millpond-Cache-Salt": salt})


async def ids_of(client: httpx.AsyncClient, text: str, begins: bool = False) -> list[int]:
    body = {"prompt": text, "add_special_tokens": begins}
    found: list[int] = (await client.post("/tokenize", json=body, headers=as_key("one"))).json()["tokens"]
    return found


async def complete(client: httpx.AsyncClient, prompt: str | list[int], key: str = "one", **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}
    answer = await client.post("/v1/completions", json=body, headers=as_key(key))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def metrics_of(client: httpx.AsyncClient) -> str:
    return (await client.get("/metrics", headers=as_key("one"))).text


def test_a_turn_goes_on_after_a_restart_for_its_key_alone(tmp_path: Path) -> None:
    ids: list[int] = []
    texts: list[str] = []

    async def first(client: httpx.AsyncClient) -> None:
        begin = await ids_of(client, BEGIN, begins=True)
        answer = await complete(client, begin, allowed_token_ids=begin[-8:])
        assert answer["usage"]["millpond"]["restored_tokens"] == 0
        said = await ids_of(client, answer["choices"][0]["text"])
        ids.extend([*begin, *said, *(await ids_of(client, MORE))])
        texts.append((await complete(client, ids))["choices"][0]["text"])

    async def second(client: httpx.AsyncClient) -> None:
        other = (await complete(client, ids, "two"))["usage"]
        assert other["millpond"]["restored_tokens"] == 0
        assert other["prompt_tokens_details"]["cached_tokens"] == 0
        salted = await complete(client, ids, cache_salt="x")
        assert salted["usage"]["millpond"]["restored_tokens"] == 0
        answer = await complete(client, ids)
        assert answer["choices"][0]["text"] == texts[0]
        use = answer["usage"]
        assert 0 < use["millpond"]["restored_tokens"] < use["prompt_tokens"]
        assert use["prompt_tokens_details"]["cached_tokens"] == use["millpond"]["restored_tokens"]
        assert use["millpond"]["exact"] is False, "a compressed cache went on"
        assert "millpond_session_hits_total 1.0" in await metrics_of(client)

    served(tmp_path, first, KEYS)
    served(tmp_path, second, KEYS)


def test_keys_see_and_remove_their_own_turns_alone(tmp_path: Path) -> None:
    path = "/v1/millpond/sessions"

    async def work(client: httpx.AsyncClient) -> None:
        await complete(client, BEGIN, "one")
        await complete(client, BEGIN, "one", cache_salt="x")
        await complete(client, BEGIN, "two")
        while "millpond_session_stored_total 3.0" not in await metrics_of(client):
            await asyncio.sleep(0.01)
        listed = {
            who: (await client.get(path, headers=as_key(*who))).json()["data"]
            for who in (("one",), ("one", "x"), ("two",), ("two", "x"))
        }
        assert [len(found) for found in listed.values()] == [1, 1, 1, 0]
        own, salted, other = (listed[who][0] for who in (("one",), ("one", "x"), ("two",)))
        assert len({own["id"], salted["id"], other["id"]}) == 3
        assert own["tokens"] == other["tokens"] > 10
        assert own["bytes"] > 1000
        for who in (("one",), ("one", "x"), ("two", "x")):
            refused = await client.delete(f"{path}/{other['id']}", headers=as_key(*who))
            missing = await client.delete(f"{path}/{'0' * 32}", headers=as_key(*who))
            assert refused.status_code == missing.status_code == 404
            assert refused.json()["error"]["code"] == missing.json()["error"]["code"] == "session_not_found"
        assert (await client.delete(f"{path}/../x", headers=as_key("one"))).status_code in (404, 405)
        assert (await client.delete(f"{path}/{'Z' * 32}", headers=as_key("one"))).status_code == 400
        assert (await client.delete(f"{path}/{own['id']}", headers=as_key("one"))).json()["deleted"] == 1
        assert (await client.delete(path, headers=as_key("one"))).json()["deleted"] == 0
        assert (await client.delete(path, headers=as_key("one", "x"))).json()["deleted"] == 1
        assert len((await client.get(path, headers=as_key("two"))).json()["data"]) == 1
        assert (await client.get(path)).status_code == 401

    served(tmp_path, work, KEYS)


def test_branches_over_http_go_on_from_the_turn_that_they_share(tmp_path: Path) -> None:
    """Sent together, one after another and after a restart: the same answers, each from the compressed common turn."""
    branches: list[list[int]] = []
    texts: list[str] = []
    read: list[int] = []

    async def answers(client: httpx.AsyncClient, together: bool) -> list[str]:
        sent = [complete(client, ids) for ids in branches]
        found = await asyncio.gather(*sent) if together else [await one for one in sent]
        assert [one["usage"]["millpond"]["restored_tokens"] for one in found] == read
        return [str(one["choices"][0]["text"]) for one in found]

    async def first(client: httpx.AsyncClient) -> None:
        begin = await ids_of(client, BEGIN, begins=True)
        answer = await complete(client, begin, allowed_token_ids=begin[-8:])
        turn = [*begin, *(await ids_of(client, answer["choices"][0]["text"]))]
        for more in (MORE, " and the meadow" + MORE, " and the river" + MORE):
            branches.append([*turn, *(await ids_of(client, more))])
            read.append(len(turn) - 1)
        texts.extend(await answers(client, True))
        assert await answers(client, False) == texts

    async def second(client: httpx.AsyncClient) -> None:
        assert await answers(client, True) == texts

    served(tmp_path, first, KEYS)
    served(tmp_path, second, KEYS)


def test_without_a_folder_there_are_none() -> None:
    async def work() -> None:
        async with client_of(FakeLLM()) as client:
            answer = await client.get("/v1/millpond/sessions")
            assert answer.status_code == 404
            assert "--cache-dir" in answer.json()["error"]["message"]

    asyncio.run(work())
