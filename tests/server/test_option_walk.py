"""No number in a request harms another: each is refused with its range, or answered in bounded time and memory."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import millpond as mp
from millpond.bench.common.memory import PeakMemory
from tests.helpers.server.live import Live, live
from tests.helpers.server.option_walk import Probe, by_choice, by_field, by_text, by_value, walk

#: Bytes that the caches may take, and what a server may take besides: activations, answers, and heaps of threads.
KV, BESIDE = 128 << 20, 96 << 20
WALKS = {"value": by_value, "choice": by_choice, "text": by_text, "field": by_field}
#: Probes of each walk in the quick suite; the sample is the same in every run.
SAMPLE = 80


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    def engine() -> mp.AsyncLLM:
        return mp.AsyncLLM("pond-recall", method="full", dtype="f32", kv_memory=KV, deterministic=True)

    with live(engine, api_keys=("mine", "theirs")) as running:
        yield running


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", WALKS)
def test_a_sample_of_all_numbers_harms_nobody(server: Live, kind: str) -> None:
    probes = list(WALKS[kind]())
    check(server, random.Random(f"{kind} 43").sample(probes, SAMPLE))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", WALKS)
def test_no_number_harms_anybody(server: Live, kind: str) -> None:
    check(server, list(WALKS[kind]()))


def check(server: Live, probes: list[Probe]) -> None:
    memory = PeakMemory()
    found = walk(server, probes)
    print(dict(found.statuses), found.slowest)
    assert not found.wrong, "\n".join(found.wrong[:20])
    assert (memory.growth() or 0) < KV + BESIDE
    assert found.statuses[200] > 0
    assert found.statuses[400] > 0
