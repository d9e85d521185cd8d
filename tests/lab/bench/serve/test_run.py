"""Runs against a server that does as it is told: times, counts, failures, both loops, the command."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.errors import DataError, OptionError
from millpond_lab.bench.serve.client import LoadClient, RequestOutcome
from millpond_lab.bench.serve.requests import LoadRequest, TokenBlocks
from millpond_lab.bench.serve.run import LoadPlan, run, summarise
from tests.helpers.server.fake_openai import FakeServer

TEXTS = [LoadRequest(0.05 * i, f"question {i}", 4) for i in range(6)]


def go(server: FakeServer, asks: list[LoadRequest] = TEXTS, **plan: Any) -> dict[str, Any]:
    return asyncio.run(run(LoadPlan(url=server.url, **plan), asks))


def test_times_are_those_of_the_server() -> None:
    """20 ms before each of four tokens: the first after 20 ms, the others 20 ms each, the whole after 80 ms."""
    with FakeServer(step_s=0.02, together=2).running() as server:
        data = go(server, users=2, levels={"ttft": 5.0, "tpot": 0.001})
    s = data["summary"]
    assert (s["sent"], s["answered"], s["output_tokens"], s["prompt_tokens"]) == (6, 6, 24, 66)
    assert 0.02 <= s["ttft_s"]["p50"] < 1
    assert 0.015 <= s["tpot_s"]["p50"] < 1
    assert 0.08 <= s["e2e_s"]["p50"] < 2
    assert s["output_tokens_per_s"] == pytest.approx(24 / s["seconds"])
    assert (s["attained"], s["attained_jointly"], s["goodput_per_s"]) == ({"ttft": 1.0, "tpot": 0.0}, 0.0, 0.0)
    assert server.most_at_once == 2
    assert data["model"] == "fake-1"


def test_numbers_by_hand() -> None:
    outcomes = [
        RequestOutcome(0.0, sent_s=0.0, first_s=1.0, ended_s=4.0, prompt_tokens=10, output_tokens=4),
        RequestOutcome(1.0, sent_s=2.0, first_s=5.0, ended_s=5.0, prompt_tokens=30, output_tokens=1),
        RequestOutcome(
            2.0, sent_s=2.0, first_s=3.0, ended_s=8.0, prompt_tokens=99, output_tokens=99, failure="cut off"
        ),
    ]
    s = summarise(outcomes, {"ttft": 2.0, "tpot": 1.0, "e2e": 3.5})
    assert s["ttft_s"] == pytest.approx({"mean": 2, "p50": 2, "p90": 2.8, "p99": 2.98, "max": 3})
    assert s["tpot_s"] == {"mean": 1, "p50": 1, "p90": 1, "p99": 1, "max": 1}
    assert s["e2e_s"]["mean"] == 3.5
    assert s["late_s"]["max"] == 1
    assert (s["seconds"], s["requests_per_s"], s["output_tokens_per_s"], s["total_tokens_per_s"]) == (
        8,
        2 / 8,
        5 / 8,
        45 / 8,
    )
    assert s["attained"] == {"ttft": 1 / 3, "tpot": 2 / 3, "e2e": 1 / 3}
    assert (s["attained_jointly"], s["goodput_per_s"]) == (0, 0)
    assert summarise(outcomes, {"tpot": 1.0})["goodput_per_s"] == 2 / 8
    assert summarise([], {})["ttft_s"] is None


def test_an_open_loop_does_not_wait() -> None:
    """All six are under way at once, though each takes longer than all arrivals together."""
    with FakeServer(step_s=0.01, together=6).running() as server:
        data = go(server, [LoadRequest(a.at_s, a.prompt, 1) for a in TEXTS], speed=5.0)
    assert server.most_at_once == 6
    assert [r["planned_s"] for r in data["requests"]] == pytest.approx([0.01 * i for i in range(6)])
    assert all(0 <= r["sent_s"] - r["planned_s"] < 0.5 for r in data["requests"])


def test_sessions_keep_their_order_in_a_closed_loop() -> None:
    asks = [LoadRequest(0, f"{session}{i}", 1, session) for i in range(4) for session in "ab"]
    with FakeServer(step_s=0.005, together=2).running() as server:
        go(server, asks, users=5)
    said = [body["prompt"] for body in server.bodies]
    assert [p for p in said if p[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert [p for p in said if p[0] == "b"] == ["b0", "b1", "b2", "b3"]
    assert server.most_at_once == 2


def test_every_failure_is_counted_and_misses_every_level() -> None:
    conduct = {0: "busy", 1: "hang up", 2: "error", 3: "garbage", 4: "cut off", 5: "silent"}
    asks = [*TEXTS, LoadRequest(0.0, "well", 4), LoadRequest(0.0, "well", 4)]
    with FakeServer(conduct=conduct).running() as server:
        data = go(server, asks, users=1, timeout_s=0.3, levels={"e2e": 60.0})
    s = data["summary"]
    assert s["failures"] == {"HTTP 429": 1, "connection lost": 1, "bad event": 2, "cut off": 1, "timeout": 1}
    assert (s["sent"], s["answered"], s["failed"]) == (8, 2, 6)
    assert s["attained"] == {"e2e": 0.25}
    assert s["goodput_per_s"] == pytest.approx(2 / s["seconds"])
    assert "too many" in data["requests"][0]["detail"]
    assert "out of memory" in data["requests"][2]["detail"]


def test_tokens_are_counted_where_the_server_does_not() -> None:
    with FakeServer(usage=False).running() as server:
        assert go(server, users=1)["summary"]["output_tokens"] == 24


def test_what_is_asked() -> None:
    asks = [LoadRequest(0, TokenBlocks(((1, 2), (2, 3))), 7)]
    with FakeServer().running() as server:
        go(server, asks, users=1, vocab_size=50, extra={"millpond": {"method": "h2o"}}, api_key="secret", seed=3)
        go(server, TEXTS[:1], users=1, chat=True, model="other", ignore_eos=False)
    tokens, chat = server.bodies
    assert tokens == {
        "model": "fake-1",
        "prompt": TokenBlocks(((1, 2), (2, 3))).tokens(50, 3),
        "max_tokens": 7,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "millpond": {"method": "h2o"},
    }
    assert chat["messages"] == [{"role": "user", "content": "question 0"}]
    assert chat["model"] == "other"
    assert "ignore_eos" not in chat
    assert "Bearer secret" in server.headers[0]
    assert "uthorization" not in server.headers[1]


def test_a_chat_begins_with_its_first_word_not_with_its_role() -> None:
    with FakeServer(step_s=0.03).running() as server:
        assert go(server, TEXTS[:2], users=1, chat=True)["summary"]["ttft_s"]["p50"] >= 0.03


def test_the_servers_own_numbers() -> None:
    """Three readings or more: 100, 900, 50 bytes; a counter that grows by one at each."""
    with FakeServer(step_s=0.4).running() as server:
        data = go(server, TEXTS[:1], users=1)
    assert data["server"]["peaks"] == {"millpond_kv_used_bytes": 900.0}
    assert data["server"]["gained"] == {"millpond_prefix_hit_tokens_total": server.scrapes - 1}


def test_a_server_that_is_not_there() -> None:
    async def ask() -> None:
        async with LoadClient("http://127.0.0.1:9") as client:
            await client.model()

    with pytest.raises(DataError, match="cannot be reached"):
        asyncio.run(ask())


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://a:notaport"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(OptionError, match=r"http://127\.0\.0\.1:8000"):
        LoadClient(url)


def test_token_ids_are_no_chat() -> None:
    with pytest.raises(OptionError, match="chat takes text"):
        asyncio.run(run(LoadPlan(url="http://x", chat=True, users=1), [LoadRequest(0, TokenBlocks(((1, 2),)), 1)]))


def test_rate_and_users_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="one of them"):
        LoadPlan(url="http://x", rate=1.0, users=1)


def test_the_command(tmp_path: Path) -> None:
    with FakeServer().running() as server:
        done = CliRunner().invoke(
            app,
            [
                "bench",
                "serve",
                "--url",
                f"{server.url}/v1",
                "--requests",
                "5",
                "--rate",
                "200",
                "--prompt-tokens",
                "8-16",
                "--output-tokens",
                "3",
                "--shared-tokens",
                "4",
                "--slo",
                "ttft=5",
                "--out",
                str(tmp_path),
            ],
        )
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "serve.json").read_text())
    assert data["summary"]["answered"] == 5
    assert len({tuple(body["prompt"][:4]) for body in server.bodies}) == 1
    assert "| goodput |" in (tmp_path / "serve.md").read_text()
    assert "goodput" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "azure"], "KIND:PATH"),
        (["--trace", "azur:x.csv"], "did you mean 'azure'"),
        (["--trace", "azure:nowhere.csv"], "cannot be read"),
        ([], "--rate or --users"),
        (["--users", "1", "--extra", "[1]"], "object"),
        (["--users", "1", "--extra", "{"], "not JSON"),
        (["--users", "1", "--slo", "ttft"], "service level"),
        (["--users", "1", "--slo", "ttft=1,ttft=2"], "once"),
        (["--users", "1", "--prompt-tokens", "9-3"], "64-256"),
        (["--users", "1", "--shared-tokens", "512"], "share fewer"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_without_httpx_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    done = CliRunner().invoke(app, ["bench", "serve", "--url", "http://x", "--users", "1"])
    assert done.exit_code == 2
    assert "pip install httpx" in done.stderr
