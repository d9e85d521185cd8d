"""A server over several workers: /cluster, drains, health by role, and metrics of each worker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from millpond.engine.cluster_figures import DrainResult, Role
from millpond.errors import OptionError
from millpond.server.openapi.info import ClusterWorkers, Health, WorkerDrained
from millpond.server.settings import ServerSettings
from tests.helpers.server.fake import FakeLLM, client_of
from tests.helpers.server.fake_cluster import FakeCluster

KEY = {"Authorization": "Bearer one"}
KEYED: dict[str, Any] = {"api_keys": ("two",), "operator_key": "one"}


def ask(method: str, path: str, llm: FakeLLM, *, key: bool = True, **settings: Any) -> Any:
    async def work() -> Any:
        async with client_of(llm, **settings) as client:
            return await client.request(method, path, headers=KEY if key else None)

    return asyncio.run(work())


def test_the_workers_and_what_moved() -> None:
    found = ask("GET", "/cluster", FakeCluster(), **KEYED).json()
    first, _, _, starting = found["workers"]
    assert first["name"] == "prefill-0"
    assert (first["role"], first["pid"], first["node"], first["state"]) == ("prefill", 11, "a", "serving")
    assert (first["requests"], first["handoff_bytes"], first["kv_bytes"], first["kv_limit"]) == (3, 70, 500, 4000)
    assert (starting["state"], "kv_bytes" in starting) == ("starting", False)
    assert (found["moved"], found["moved_bytes"], found["replayed"], found["deaths"]) == (5, 1000, 2, 1)


@pytest.mark.parametrize(("method", "path"), [("GET", "/cluster"), ("POST", "/cluster/workers/decode-0/drain")])
def test_strangers_learn_and_drain_nothing(method: str, path: str) -> None:
    cluster = FakeCluster()
    assert ask(method, path, cluster, key=False, **KEYED).status_code == 401
    holder = ask(method, path, cluster, api_keys=("one",), operator_key="two")
    assert (holder.status_code, holder.json()["error"]["code"]) == (403, "wrong_operator_key")
    unset = ask(method, path, cluster, api_keys=("one",))
    assert (unset.status_code, unset.json()["error"]["code"]) == (403, "needs_operator_key")
    assert "--operator-key" in unset.json()["error"]["message"]
    alone = ask(method, path, cluster, key=False, operator_key="two")
    assert (alone.status_code, alone.json()["error"]["code"]) == (403, "wrong_operator_key"), "no API keys at all"
    assert ask(method, path, FakeLLM(), **KEYED).status_code == 404, "one engine has no workers"
    assert cluster.drained == []


def test_without_any_keys_workers_are_listed_and_not_drained() -> None:
    cluster = FakeCluster()
    assert ask("GET", "/cluster", cluster, key=False).status_code == 200
    found = ask("POST", "/cluster/workers/decode-0/drain", cluster)
    assert (found.status_code, found.json()["error"]["code"]) == (403, "needs_operator_key")
    assert cluster.drained == []
    found = ask("POST", "/cluster/workers/decode-0/drain", cluster, operator_key="one")
    assert found.status_code == 200
    assert cluster.drained == [("decode-0", True)]


def test_the_operators_key_opens_nothing_else() -> None:
    assert ask("GET", "/v1/models", FakeCluster(), **KEYED).status_code == 401
    assert ask("GET", "/metrics", FakeCluster(), **KEYED).status_code == 401
    assert ask("GET", "/clusters", FakeCluster(), **KEYED).status_code == 401


def test_operators_keys_that_would_protect_nothing() -> None:
    with pytest.raises(OptionError, match="is an API key too") as refused:
        ServerSettings(api_keys=("secret",), operator_key="secret")
    assert "secret" not in str(refused.value)
    with pytest.raises(OptionError, match="operator's key is empty"):
        ServerSettings(operator_key=" ")
    assert "secret" not in repr(ServerSettings(operator_key="secret"))


def test_a_worker_is_drained() -> None:
    cluster = FakeCluster()
    found = ask("POST", "/cluster/workers/decode-0/drain", cluster, **KEYED)
    assert found.json() == {"worker": "decode-0", "moved": 2, "replayed": 1, "seconds": 0.25}
    assert (cluster.drained, cluster.roles) == ([("decode-0", True)], [None])
    refused = ask("POST", "/cluster/workers/decode-0/drain?replace=false", cluster, **KEYED)
    assert (refused.status_code, "only one" in refused.json()["error"]["message"]) == (400, True)
    assert ask("POST", "/cluster/workers/nobody/drain", cluster, **KEYED).status_code == 404
    assert len(cluster.drained) == 1
    assert ask("POST", "/cluster/workers/decode-0/drain?role=prefill", cluster, **KEYED).status_code == 200
    assert cluster.roles == [None, "prefill"]
    assert ask("POST", "/cluster/workers/decode-0/drain?role=both", cluster, **KEYED).status_code in (400, 422)


class SlowCluster(FakeCluster):
    """Its drains begin, and end when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go = asyncio.Event(), asyncio.Event()

    async def drain(self, worker: str, *, replace: bool = True, role: Role | None = None) -> DrainResult:
        self.began.set()
        await self.go.wait()
        return await super().drain(worker, replace=replace, role=role)


def test_one_drain_at_a_time() -> None:
    async def work() -> list[int]:
        cluster = SlowCluster()
        async with client_of(cluster, **KEYED) as client:
            path = "/cluster/workers/decode-0/drain"
            first = asyncio.create_task(client.post(path, headers=KEY))
            await cluster.began.wait()
            second = await client.post(path, headers=KEY)
            cluster.go.set()
            return [one.status_code for one in (await first, second, await client.post(path, headers=KEY))]

    assert asyncio.run(work()) == [200, 409, 200]


def test_health_names_the_role_without_a_worker() -> None:
    cluster = FakeCluster()
    assert ask("GET", "/health", cluster, key=False, **KEYED).json() == {
        "status": "ok",
        "roles": {"prefill": 1, "decode": 1},
    }
    del cluster.there[2]
    found = ask("GET", "/health", cluster, key=False, **KEYED)
    assert found.status_code == 503
    assert found.json() == {
        "status": "stalled",
        "reason": "no decode worker serves",
        "roles": {"prefill": 1, "decode": 0},
    }
    assert ask("GET", "/health", FakeLLM()).json() == {"status": "ok"}


def test_metrics_of_each_worker() -> None:
    samples = {}
    for family in text_string_to_metric_families(ask("GET", "/metrics", FakeCluster(), api_keys=("one",)).text):
        assert family.documentation
        for sample in family.samples:
            samples[sample.name, *(sample.labels[key] for key in sorted(sample.labels, reverse=True))] = sample.value
    assert samples["millpond_kv_used_bytes",] == 500, "the sum has no label"
    for name in ("prefill-0", "prefill-1", "decode-0"):
        assert samples["millpond_worker_kv_used_bytes", name, name[:-2]] == 500
        assert samples["millpond_worker_generated_tokens_total", name, name[:-2]] == 30
    assert samples["millpond_worker_requests", "decode-1", "decode"] == 0
    assert ("millpond_worker_kv_used_bytes", "decode-1", "decode") not in samples
    assert samples["millpond_worker_handoff_bytes", "prefill-0", "prefill"] == 70
    assert samples["millpond_workers", "draining", "prefill"] == 1
    assert samples["millpond_moved_requests_total",] == 5
    assert samples["millpond_resumed_requests_total",] == 3
    assert samples["millpond_checkpoint_bytes_total",] == 700
    assert samples["millpond_worker_deaths_total",] == 1
    alone = ask("GET", "/metrics", FakeLLM()).text
    assert "millpond_worker" not in alone
    assert "millpond_moved" not in alone


@pytest.mark.parametrize("settings", [{}, {"api_keys": ("one",)}])
def test_the_document_describes_the_routes_of_a_cluster(settings: dict[str, Any]) -> None:
    cluster = FakeCluster()
    document = ask("GET", "/openapi.json", cluster, **settings).json()
    sent = {"/cluster": ("get", ClusterWorkers), "/cluster/workers/{name}/drain": ("post", WorkerDrained)}
    for path, (method, kind) in sent.items():
        assert kind.__name__ in json.dumps(document["paths"][path][method]["responses"]["200"])
        assert kind.__name__ in document["components"]["schemas"]
    ClusterWorkers.model_validate(ask("GET", "/cluster", cluster, **KEYED).json())
    Health.model_validate(ask("GET", "/health", cluster, key=False).json())
    drained = ask("POST", "/cluster/workers/decode-0/drain", cluster, **KEYED).json()
    WorkerDrained.model_validate(drained)
