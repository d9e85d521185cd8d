"""Workers in processes of their own: one Ray for all of these tests, with its files in a temporary place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

import millpond as mp
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.errors import OptionError
from millpond.install_command import install_command
from tests.helpers.cluster.chaos import runs

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # Ray's own warnings
]

OPTIONS: dict[str, Any] = {"method": "h2o", "budget": 64}
PROMPTS = [
    f"{name} {thing} " + "quiet rain " * 40 + f"<ask> {name} <is>"
    for name, thing in (("anna", "kettle"), ("bob", "lamp"))
]
PARAMS = mp.SamplingParams(max_tokens=32, temperature=0.8, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with mp.LLM("pond-recall", **OPTIONS) as llm:
        return [output.completions[0].text for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def split() -> Iterator[Any]:
    with mp.cluster.LLM("pond-recall", prefill=1, decode=1, threads=1, **OPTIONS) as llm:
        pids = [worker.pid for worker in llm.workers()]
        yield llm
        pids += [worker.pid for worker in llm.workers()]
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists(), "a worker is left"


def test_a_split_gives_the_outputs_of_one_engine(split: Any, expected: list[str]) -> None:
    outputs = split.generate(PROMPTS, PARAMS)
    assert [output.completions[0].text for output in outputs] == expected
    figures = split.figures()
    assert (figures.moved, figures.deaths) == (2, 0)
    assert 0 < figures.moved_bytes < figures.full_bytes
    assert sorted(worker.role for worker in split.workers()) == ["decode", "prefill"]
    assert len({worker.pid for worker in split.workers()} | {os.getpid()}) == 3


def test_workers_have_the_priority_of_whoever_started_them(split: Any) -> None:
    """Ray gives its processes a lower one, with which they starve next to anything else that computes."""
    assert {os.getpriority(os.PRIO_PROCESS, worker.pid) for worker in split.workers()} == {
        os.getpriority(os.PRIO_PROCESS, 0)
    }
    assert {worker.node for worker in split.workers()} != {""}


def test_errors_keep_their_class_from_process_to_process(split: Any) -> None:
    with pytest.raises(OptionError, match="the prompt is empty"):
        split.generate([()], PARAMS)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_worker_costs_no_token(split: Any, expected: list[str], role: str) -> None:
    """It gets SIGKILL once a request of it has so many tokens; the first pid that it had is gone."""
    before = {worker.role: worker.pid for worker in split.workers()}
    outputs: SimpleQueue[RequestOutput] = SimpleQueue()

    def deliver(output: RequestOutput) -> None:
        outputs.put(output)
        enough = 5 if role == "decode" else 1
        if len(output.completions[0].token_ids) >= enough and not output.finished and killed == []:
            killed.append(before[role])
            os.kill(before[role], signal.SIGKILL)

    killed: list[int] = []
    done = run_all(split, deliver, outputs)
    assert killed == [before[role]]
    assert [done[str(index)] for index in range(len(PROMPTS))] == expected
    assert split.figures().deaths == (1 if role == "decode" else 2)
    assert split.figures().replayed >= 1


def run_all(llm: Any, deliver: Callable[[RequestOutput], None], outputs: SimpleQueue[RequestOutput]) -> dict[str, str]:
    """The text of each request; fails where a client would see a token twice or one less."""
    cluster, done, seen = llm._cluster, dict[str, str](), dict[str, str]()
    for index, prompt in enumerate(PROMPTS):
        request = Request(request_id=str(index), prompt=prompt, params=PARAMS)
        cluster.loop.call(lambda request=request: cluster.dispatcher.submit(request, deliver)).result()
    while len(done) < len(PROMPTS):
        output = outputs.get()
        text = output.completions[0].text
        assert text.startswith(seen.get(output.request_id, ""))
        seen[output.request_id] = text
        if output.finished:
            assert output.error is None
            done[output.request_id] = text
    return done


def test_a_model_that_is_not_there_is_an_option_error_and_leaves_no_process(split: Any) -> None:
    with pytest.raises(OptionError, match="no-such-model"):
        mp.cluster.LLM("no-such-model-anywhere", replicas=1)


def test_without_ray_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\nimport millpond as mp\nassert 'torch' not in sys.modules\n"
        "mp.cluster.LLM('pond-recall', replicas=2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert install_command("cluster") in done.stderr


def test_importing_the_package_loads_no_ray() -> None:
    code = "import sys, millpond; millpond.cluster; print('ray' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_frozen_worker_is_gone_as_soon_as_it_is_lost() -> None:
    """Ray alone would let it go on for five seconds, with its memory, beside the one in its place."""
    with mp.cluster.LLM("pond-recall", replicas=1, threads=1, **OPTIONS) as llm:
        (handle,) = llm._cluster.dispatcher._pool.serving.values()
        os.kill(handle.pid, signal.SIGSTOP)
        process = psutil.Process(handle.pid)
        llm._cluster.loop.call(handle.kill).result()
        psutil.wait_procs([process], timeout=1.5)
        assert not runs(process.pid)
