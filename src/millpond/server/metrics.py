"""Metrics for Prometheus: the engine's current numbers, and times of answers."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.cache.chunks.store import ChunkStoreStats
from millpond.engine.cluster_figures import WorkerInfo
from millpond.engine.outputs import EngineStats, PrefixStats, RequestOutput
from millpond.engine.sessions.folder import SessionStats
from millpond.server.admission import AdmissionControl
from millpond.server.llm_protocol import ServedCluster, ServedLLM

#: Seconds. From a tiny model in memory to a long prompt behind a queue.
_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_WHOLE = (0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class EngineCollector(Collector):
    """Reads `EngineStats` again at every scrape."""

    def __init__(self, llm: ServedLLM, admission: AdmissionControl) -> None:
        self._llm = llm
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """Yield every number of the engine under its name."""
        stats = self._llm.stats()
        admission = {
            "requests_under_way": (
                "Prompts that have arrived and are not answered yet.",
                len(self._admission.under_way),
            ),
            "engine_step_age_seconds": ("Seconds since the engine's current step began.", self._llm.step_age_s),
            "engine_stalled": ("1 while the engine hangs or has ended.", int(self._admission.trouble is not None)),
        }
        yield from _families(GaugeMetricFamily, "", gauges_of(stats) | admission)
        yield from _families(CounterMetricFamily, "", counters_of(stats))
        if stats.prefix is not None:
            yield from _of_prefix_cache(stats.prefix)
        if stats.chunks is not None:
            yield from _of_chunks(stats.chunks)
        if stats.sessions is not None:
            yield from _of_sessions(stats.sessions)


def _families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    prefix: str,
    numbers: Mapping[str, tuple[str, float]],
    labels: Mapping[str, str] | None = None,
) -> Iterator[Metric]:
    """Yield a family for each number, which comes with its text, by the end of its name."""
    for name, (text, value) in numbers.items():
        family = kind(f"millpond_{prefix}{name}", text, labels=[*(labels or {})])
        family.add_metric([*(labels or {}).values()], value)
        yield family


def _of_sessions(stats: SessionStats) -> Iterator[Metric]:
    """Yield bytes, hits and failures of stored sessions."""
    gauges = {
        "disk_bytes": ("Bytes of stored turns.", stats.disk_bytes),
        "disk_limit_bytes": ("What stored turns may never exceed.", stats.disk_limit),
        "waiting_bytes": ("Bytes of turns that wait to be written.", stats.waiting_bytes),
    }
    yield from _families(GaugeMetricFamily, "session_", gauges)
    counters = {
        "hits": ("Requests that continued a stored turn.", stats.hits),
        "misses": ("Other requests that could have.", stats.misses),
        "stored": ("Turns that were written.", stats.stored),
        "evicted": ("Files of turns that were removed, for room.", stats.evicted),
        "torn_files": ("Files of turns that were cut, changed or foreign.", stats.torn),
        "dropped": ("Turns that were not written: too many waited, or too large.", stats.dropped),
        "write_failures": ("Files of turns that the disk did not take.", stats.write_failures),
        "read_failures": ("Files of turns that the disk did not give.", stats.read_failures),
    }
    yield from _families(CounterMetricFamily, "session_", counters)


def gauges_of(stats: EngineStats) -> dict[str, tuple[str, int]]:
    """Return what an engine holds now: texts and numbers, by the ends of their names."""
    gauges = {
        "requests_running": ("Requests that run and hold pages.", stats.running),
        "requests_waiting": ("Requests that wait in the queue.", stats.waiting),
        "requests_swapped": ("Requests whose pages lie in host memory.", stats.swapped),
        "swapped_bytes": ("Bytes of preempted requests' caches in host memory.", stats.swapped_bytes),
        "kv_used_bytes": ("Bytes of pages in use.", stats.kv_bytes),
        "kv_reserved_bytes": ("Bytes of all pages, including free ones, and of states.", stats.kv_reserved),
        "state_bytes": ("Bytes of recurrent and convolution states of hybrids.", stats.state_bytes),
        "weight_bytes": ("Bytes of the model's weights in memory.", stats.weight_bytes),
        "kv_saved_bytes": ("Bytes that full caches of the running requests would hold in addition.", stats.kv_saved),
    }
    if stats.kv_limit is not None:
        gauges["kv_limit_bytes"] = "Limit of the bytes of pages and states.", stats.kv_limit
    return gauges


def counters_of(stats: EngineStats) -> dict[str, tuple[str, float]]:
    """Return what an engine has done since its start: texts and numbers, by their names' ends."""
    return {
        "prompt_tokens": ("Tokens of prompts that were computed.", stats.prompt_tokens),
        "generated_tokens": ("Tokens generated.", stats.generated_tokens),
        "evicted_entries": ("Entries evicted from caches, over layers and heads.", stats.evicted_entries),
        "prefix_hit_tokens": ("Tokens of prompts that came from shared pages.", stats.shared_tokens),
        "chunk_reused_tokens": ("Tokens of prompts that came from the chunk store.", stats.reused_tokens),
        "session_restored_tokens": ("Tokens of prompts that came from stored turns.", stats.restored_tokens),
        "sequence_encode_seconds": ("Seconds of coding stored turns, preempted and moved requests.", stats.encode_s),
        "sequence_decode_seconds": ("Seconds of decoding stored turns, preempted and moved requests.", stats.decode_s),
        "preemptions": ("Requests that were preempted.", stats.preemptions),
        "requests_finished": ("Requests that ended, for any reason.", stats.finished),
    }


def _of_chunks(stats: ChunkStoreStats) -> Iterator[Metric]:
    """Yield bytes, hits and failures of the chunk store."""
    for tier, nbytes in (("memory", stats.memory_bytes), ("disk", stats.disk_bytes)):
        yield GaugeMetricFamily(f"millpond_chunk_{tier}_bytes", f"Bytes of stored chunks ({tier}).", nbytes)
    counters = {
        "memory_hits": ("Chunks that were taken from memory.", stats.memory_hits),
        "disk_hits": ("Chunks that were taken from the disk.", stats.disk_hits),
        "misses": ("Chunks of prompts that had no variant.", stats.misses),
        "stored": ("Variants of chunks that were stored.", stats.stored),
        "memory_evicted": ("Variants that left memory, for room.", stats.memory_evicted),
        "disk_evicted": ("Files of chunks that were removed, for room.", stats.disk_evicted),
        "torn_files": ("Files of chunks that were cut or changed.", stats.torn),
        "foreign_files": ("Files of another model or format.", stats.foreign),
        "write_failures": ("Files of chunks that the disk did not take.", stats.write_failures),
        "read_failures": ("Files of chunks that the disk did not give.", stats.read_failures),
        "left_out_rows": ("Tokens of chunks out of focus that layers left out, by layer.", stats.left_out),
        "load_failures": ("Requests whose chunks could not be loaded, and were computed.", stats.load_failures),
        "load_timeouts": (
            "Requests whose chunks were computed, since nothing came from the disk.",
            stats.load_timeouts,
        ),
        "begun_again": ("Prompts that began again for a layer of a chunk that was not in.", stats.begun_again),
        "not_finite": ("Variants with numbers that the store's format cannot hold.", stats.not_finite),
    }
    yield from _families(CounterMetricFamily, "chunk_", counters)


def _of_prefix_cache(prefix: PrefixStats) -> Iterator[Metric]:
    """Yield blocks of the prefix cache, each number under the name of its paging rule."""
    gauges = {
        "prefix_blocks": ("Blocks that the prefix cache holds.", prefix.blocks),
        "prefix_sums_bytes": ("Bytes of sums over queries at breakpoints.", prefix.sums_bytes),
        "prefix_disk_blocks": ("Blocks of prompts on the disk.", prefix.disk_blocks),
        "prefix_disk_bytes": ("Their bytes.", prefix.disk_bytes),
        "prefix_coded_blocks": ("Blocks of prompts with codes in memory.", prefix.coded_blocks),
        "prefix_coded_bytes": ("Bytes of these codes.", prefix.coded_bytes),
    }
    yield from _families(GaugeMetricFamily, "", gauges, {"rule": prefix.rule})
    counters = {
        "prefix_blocks_returned": ("Blocks of prompts that came back from the disk.", prefix.returned),
        "prefix_blocks_lost": ("Blocks of prompts on the disk that could not be read.", prefix.lost),
        "prefix_block_hits": ("Blocks of prompts that were taken from the prefix cache.", prefix.hits),
        "prefix_block_misses": ("Blocks of prompts that were not in the prefix cache.", prefix.misses),
        "prefix_blocks_evicted": ("Blocks that the paging rule chose to evict.", prefix.evicted),
        "prefix_blocks_encoded": ("Blocks of prompts that were coded.", prefix.encoded),
        "prefix_blocks_decoded": ("Blocks of prompts that were decoded.", prefix.decoded),
        "prefix_encode_seconds": ("CPU seconds of coding blocks.", prefix.encode_s),
        "prefix_decode_seconds": ("CPU seconds of decoding blocks.", prefix.decode_s),
        "prefix_decoded_tokens": ("Tokens of prompts that came from codes.", prefix.decoded_tokens),
    }
    yield from _families(CounterMetricFamily, "", counters, {"rule": prefix.rule})


class WorkerCollector(Collector):
    """Numbers of each worker of a cluster, read again at every scrape.

    They have the labels `worker` and `role`. Their names begin with `millpond_worker_`, so that sums over other names
    count nothing twice.
    """

    def __init__(self, cluster: ServedCluster) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        """Yield workers by state, each one's numbers, and counters of moves, replays and losses."""
        workers, figures = self._cluster.workers(), self._cluster.figures()
        states = GaugeMetricFamily("millpond_workers", "Workers by role and state.", labels=["role", "state"])
        for (role, state), number in sorted(Counts((one.role, one.state) for one in workers).items()):
            states.add_metric([role, state], number)
        yield states
        yield from self._of_workers(workers)
        counters = {
            "moved_requests": ("Requests that moved between workers.", figures.moved),
            "moved_bytes": ("Bytes that moved with requests.", figures.moved_bytes),
            "moved_full_bytes": ("Bytes of full caches of the requests that moved.", figures.full_bytes),
            "move_seconds": ("Seconds that moves of requests took, from offer to arrival.", figures.move_s),
            "replayed_requests": ("Requests that were replayed on another worker.", figures.replayed),
            "checkpoints": ("Copies of requests that decode.", figures.checkpoints),
            "checkpoint_bytes": ("Bytes of copies of requests that decode.", figures.checkpoint_bytes),
            "resumed_requests": ("Requests that were resumed from a copy.", figures.resumed),
            "role_changes": ("Workers that were restarted in another role.", figures.role_changes),
            "worker_deaths": ("Workers that ended or did not answer.", figures.deaths),
        }
        yield from _families(CounterMetricFamily, "", counters)

    def _of_workers(self, workers: Sequence[WorkerInfo]) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for one in workers:
            own = {
                "requests": ("Requests that the worker has.", one.requests),
                "handoff_bytes": ("Bytes of requests that wait in this worker for another one.", one.handoff_bytes),
            }
            gauges, counters = (own, {}) if one.stats is None else (own | gauges_of(one.stats), counters_of(one.stats))
            for kind, numbers in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
                for name, (text, value) in numbers.items():
                    if name not in families:
                        families[name] = kind(f"millpond_worker_{name}", text, labels=["worker", "role"])
                    families[name].add_metric([one.name, one.role], value)  # type: ignore[attr-defined]
        yield from families.values()


class Metrics:
    """All metrics of one server.

    Attributes:
        requests: Answers of HTTP so far.
    """

    def __init__(self, llm: ServedLLM, admission: AdmissionControl) -> None:
        self.requests = 0
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(llm, admission))
        if isinstance(llm, ServedCluster):
            self._registry.register(WorkerCollector(llm))
        self._first = self._histogram("time_to_first_token_seconds", "Seconds from arrival to the first token.", _TTFT)
        self._each = self._histogram("time_per_output_token_seconds", "Seconds per token after the first.", _TPOT)
        self._whole = self._histogram("request_seconds", "Seconds from arrival to the last token.", _WHOLE)
        self._ends = Counter(
            "millpond_answers", "Answers by the reason of their end.", ["reason"], registry=self._registry
        )
        self._http = Counter(
            "millpond_http_requests", "Requests by path and status.", ["path", "status"], registry=self._registry
        )
        self.left = Counter(
            "millpond_clients_left",
            "Clients that disconnected before their answer was complete.",
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"millpond_{name}", text, buckets=buckets, registry=self._registry)

    def finished(self, output: RequestOutput) -> None:
        """Note the times of a request that is over."""
        for completion in output.completions:
            self._ends.labels(completion.finish_reason).inc()
        times = output.times
        if times.first_token is None or times.finished is None:
            return
        self._first.observe(times.first_token - times.arrived)
        self._whole.observe(times.finished - times.arrived)
        longest = max(len(completion.token_ids) for completion in output.completions)
        if longest > 1:
            self._each.observe((times.finished - times.first_token) / (longest - 1))

    def answered(self, path: str, status: int) -> None:
        """Note an answer of HTTP."""
        self.requests += 1
        self._http.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """Return the text for Prometheus."""
        return generate_latest(self._registry)


class Counted:
    """Counts every answer by the route that gave it; paths without a route are one.

    It is plain ASGI.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        await self._app(scope, receive, counting)
