"""The course of a block that plans count with is that of the engine, sweep by sweep."""

from __future__ import annotations

import pytest

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.offload.cost import block_sweeps
from millpond.engine.request import Request
from tests.helpers.hf.families import VOCABULARY, family


@pytest.mark.parametrize(
    ("sequences", "prompt", "new", "step_tokens"),
    [(1, 40, 5, 16), (3, 50, 4, 64), (7, 33, 30, 32), (40, 12, 6, 16), (40, 3, 8, 512), (12, 20, 1, 48)],
)
def test_the_engine_takes_as_many_sweeps(sequences: int, prompt: int, new: int, step_tokens: int) -> None:
    engine = Engine(family("llama").make(), method="full", max_step_tokens=step_tokens, max_running=sequences)
    params = mp.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    for n in range(sequences):
        ids = tuple((place + n) % (VOCABULARY - 3) + 3 for place in range(prompt))
        engine.add(Request(request_id=str(n), prompt=ids, params=params))
    steps = []
    while engine.busy:
        before = engine.stats()
        engine.step()
        now = engine.stats()
        steps.append((now.prompt_tokens - before.prompt_tokens, now.generated_tokens - before.generated_tokens))
    engine.close()
    reading, decoding = [step for step in steps if step[0]], [step for step in steps if not step[0]]
    course = block_sweeps(sequences, prompt, new, step_tokens)
    assert (course.prefill, course.decode) == (len(reading), len(decoding))
    assert course.prompt_rows == pytest.approx(sequences * prompt / len(reading))
    assert course.meanwhile + course.ends == pytest.approx(sum(n for _, n in reading) / len(reading))
    if decoding:
        assert course.decoding == pytest.approx(sum(n for _, n in decoding) / len(decoding))


def test_prompts_that_wait_for_those_that_decode_take_more_sweeps() -> None:
    """With more sequences than rows in a sweep an eighth is left for prompts."""
    course = block_sweeps(64, 64, 1000, 32)
    assert course.prefill > 64 * 64 / 32 * 2
    assert course.meanwhile > 32
