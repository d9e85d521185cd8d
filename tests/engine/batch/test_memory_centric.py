"""A planned batch fills its steps by memory: answers decode beside full chunks of prompts, and change no token."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.engine.llm import LLM
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.scheduler import Scheduler, Step
from millpond.engine.scheduler_request import MemoryNeed, RequestStatus, SchedulerRequest
from tests.helpers.engine.helpers import prompt
from tests.helpers.hf.families import shared_model

STEP, PROMPT, NEW = 64, 60, 24
#: Bytes of a sequence, and of one row of a step.
KV, ROW = 100, 3


def life(row_bytes: int, limit: int | None, n: int = 256, max_running: int = 64) -> tuple[list[Step], int]:
    """The steps of a batch of `n` prompts and their answers, and the most bytes reserved."""
    scheduler = Scheduler(limit, step_tokens=STEP, max_running=max_running)
    requests = [SchedulerRequest(str(i), PROMPT, MemoryNeed(KV, 0, KV), row_bytes=row_bytes) for i in range(n)]
    for request in requests:
        scheduler.add(request)
    steps, most = [], 0
    while len(scheduler):
        steps.append(step := scheduler.plan())
        most = max(most, scheduler.reserved_bytes)
        for request, n_tokens in step.prefills:
            scheduler.add_computed_tokens(request, n_tokens)
        for request in step.decodes:
            if request.num_decoded_tokens == NEW:
                scheduler.remove(request)
    return steps, most


def read(step: Step) -> int:
    return sum(n for _, n in step.prefills)


def test_decoding_rows_leave_the_chunk_to_prompts_and_memory_limits_how_many_run() -> None:
    limit = 256 * (KV + ROW)
    before, _ = life(0, limit)
    steps, most = life(ROW, limit)
    assert len(steps) < 0.85 * len(before)
    assert most <= limit
    reading = [read(step) for step in steps if step.prefills]
    assert min(reading[:-1]) == STEP, "a valley"
    assert min(read(step) for step in before if step.prefills) < STEP
    assert max(len(step.decodes) + read(step) for step in steps) > STEP


@pytest.mark.parametrize("sequences", [1, 5, 40])
def test_rows_count_against_the_limit(sequences: int) -> None:
    limit = sequences * (KV + ROW) + KV
    steps, most = life(ROW, limit, n=60)
    assert most <= limit
    assert max(len(step.decodes) for step in steps) <= sequences


def test_without_a_limit_of_memory_the_number_of_sequences_holds() -> None:
    steps, _ = life(ROW, None, n=120, max_running=8)
    assert max(len(step.decodes) for step in steps) == 8


def test_a_request_too_large_beside_its_row_runs_alone() -> None:
    steps, _ = life(10 * KV, KV, n=3)
    assert max(len(step.decodes) for step in steps) == 1


def test_other_requests_are_admitted_by_number_beside_a_batch() -> None:
    scheduler = Scheduler(10_000, step_tokens=STEP, max_running=4)
    for i in range(12):
        scheduler.add(SchedulerRequest(f"batch {i}", 4, MemoryNeed(KV, 0, KV), row_bytes=ROW))
    for i in range(6):
        scheduler.add(SchedulerRequest(f"own {i}", 4, MemoryNeed(KV, 0, KV)))
    for _ in range(4):
        for request, n_tokens in scheduler.plan().prefills:
            scheduler.add_computed_tokens(request, n_tokens)
    running = [request for request in scheduler.plan().decodes if request.status is RequestStatus.DECODE]
    assert len([request for request in running if request.row_bytes]) == 12
    assert len([request for request in running if not request.row_bytes]) == 4


def answers(schedule: str, **options: Any) -> tuple[list[tuple[int, ...]], int, int]:
    """Tokens of every answer, the number of steps, and the most bytes of pages."""
    prompts = [prompt(40 + i % 20) for i in range(32)]
    with LLM(shared_model("llama"), method="full", codec="f32", page_slots=4, max_step_tokens=40, **options) as llm:
        seen: list[int] = []
        llm.engine.on_step = lambda *_: seen.append(llm.engine.stats().kv_bytes)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=30, temperature=0), schedule=schedule)  # type: ignore[arg-type]
        return [output.completions[0].token_ids for output in outputs], len(seen), max(seen)


def test_a_batch_takes_fewer_steps_inside_its_limit_and_answers_alike() -> None:
    limit = 2**21
    there, n_there, _ = answers("arrival", kv_memory=limit, prefix_cache=False)
    here, n_here, most = answers("batch", kv_memory=limit, prefix_cache=False)
    assert here == there
    assert n_here < 0.95 * n_there
    assert most <= limit
