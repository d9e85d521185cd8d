"""`millpond-vllm serve` as a user runs it: the engine in a process of its own, requests over HTTP."""

import json
import re
from pathlib import Path

import pytest
from vllm_helpers.engines import need_vllm
from vllm_helpers.models import tiny_llama

need_vllm()
from vllm_helpers.servers import SMALL, add_tokenizer, installed, server  # noqa: E402

pytestmark = pytest.mark.slow
OWN = Path(__file__).parents[1]
PROMPT = " ".join(f"w{index * 37 % 500 + 5}" for index in range(300))
#: Blocks of 32: 300 tokens are 8 blocks in front of the newest 32, and 20 % of them one.
KEPT = {"events": 1, "blocks_freed": 7, "entries_kept": 32, "recent": 32, "packed_in_place": 0}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    model = tiny_llama(folder / "tiny")
    add_tokenizer(model)
    arguments = ["--method", "snapkv", "--budget", "20%", "--served-model-name", "tiny", *SMALL]
    arguments += ["--num-gpu-blocks-override", "100", "--additional-config", '{"a": 1}']
    with server(model, *arguments, log=folder / "log", python_path=installed(folder / "site", OWN)) as one:
        yield one


def complete(client, **more):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}
    return client.post("/v1/completions", json=body)


def chat(client, **more):
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("ask", [complete, chat])
def test_figures_come_back_with_an_answer(client, ask):
    assert ask(client).json()["kv_transfer_params"] == {"millpond": KEPT}


def test_a_request_has_settings_of_its_own(client):
    own = {"millpond_budget": "50%", "millpond_keep": [0, 40, 60, 70], "millpond_sinks": 2, "millpond_recent": 40}
    figures = complete(client, vllm_xargs=own).json()["kv_transfer_params"]["millpond"]
    assert (figures["recent"], figures["entries_kept"]) == (40, 96)
    whole = complete(client, vllm_xargs={"millpond_budget": "none"}).json()
    assert whole["kv_transfer_params"] is None


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"millpond_budget": "lots"}, "is not a budget"),
        ({"millpond_bugdet": "30%"}, "there are budget, recent, sinks, keep"),
        ({"millpond_keep": [5, 3]}, "its end lies behind it"),
        ({"millpond_recent": -1}, "whole number"),
    ],
)
def test_a_wrong_setting_is_a_400_and_the_server_lives_on(client, ask, own, says):
    answer = ask(client, vllm_xargs=own)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert complete(client).json()["kv_transfer_params"] == {"millpond": KEPT}


def test_a_setting_that_only_the_engine_can_refuse_is_named_in_the_figures(client):
    figures = complete(client, vllm_xargs={"millpond_budget": 40}).json()["kv_transfer_params"]["millpond"]
    assert "leaves no block of 32 tokens" in figures.pop("ignored")
    assert figures == KEPT


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_stream_is_answered_and_a_wrong_one_tells_why(client, ask):
    given = ask(client, stream=True).text.splitlines()
    assert given[-2] == "data: [DONE]" or "data: [DONE]" in given
    wrong = ask(client, stream=True, vllm_xargs={"millpond_budget": "lots"}).text
    first = json.loads(wrong.split("data: ", 1)[1].splitlines()[0])
    assert first["error"]["code"] == 400


def test_metrics_show_the_totals_and_no_block_is_left(client):
    before = _metrics(client)
    assert complete(client).status_code == 200
    after = _metrics(client)
    assert after["millpond_vllm_events_total"] == before["millpond_vllm_events_total"] + 1
    assert after["millpond_vllm_blocks_freed_total"] == before["millpond_vllm_blocks_freed_total"] + 7
    assert after["vllm:kv_cache_usage_perc"] == after["vllm:num_requests_running"] == 0


def _metrics(client):
    found = re.findall(r"^(millpond_\w+|vllm:\w+)\{[^}]*\} (\S+)$", client.get("/metrics").text, re.M)
    return {name: float(value) for name, value in found}
