"""generate_dataset on a Ray of its own: each row once with the answer of one engine, one process killed meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import millpond as mp

pytest.importorskip("ray.data", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
NAMES = ("anna", "bob", "clara", "dora")
PARAMS = mp.SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
ROWS = [
    {"id": n, "text": f"{NAMES[n % 4]} kettle " + "quiet rain " * (5 + n % 7) + f"<ask> {NAMES[n % 4]} <is>"}
    for n in range(160)
]
OPTIONS: dict[str, Any] = {"method": "h2o", "budget": 64, "threads": 1}


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import ray

    folder = Path("/tmp") / f"mp-{os.getpid()}"  # sockets have short names
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(folder),
        object_store_memory=200 * 2**20,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


def kill_one(out: Path, killed: list[int]) -> None:
    """SIGKILL for the first process with an engine once it has written answers."""
    while not list(out.glob("*.jsonl")):
        time.sleep(0.05)
    for child in psutil.Process().children(recursive=True):
        if child.name().startswith("ray::MapWorker") or "AnswerRows" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)
            killed.append(child.pid)
            return


def test_each_row_once_with_a_process_killed_and_a_second_run(ray: Any, tmp_path: Path) -> None:
    rows = [{**row, "text": None} if row["id"] == 7 else row for row in ROWS]
    dataset = ray.data.from_items(rows, override_num_blocks=2)
    killed: list[int] = []
    killer = threading.Thread(target=kill_one, args=(tmp_path, killed), daemon=True)
    killer.start()
    found = mp.cluster.generate_dataset(
        dataset, "pond-recall", params=PARAMS, replicas=2, in_flight=8, out=tmp_path, **OPTIONS
    ).take_all()
    killer.join(60)
    assert killed, "a process was killed while there were rows to do"
    assert sorted(row["id"] for row in found) == [row["id"] for row in rows], "each row once"
    failed = [row for row in found if row["error"] is not None]
    assert [(row["id"], row["answer"]) for row in failed] == [(7, None)]
    with mp.LLM("pond-recall", **OPTIONS) as llm:
        texts = [row["text"] for row in rows if row["text"]]
        expected = [output.completions[0].text for output in llm.generate(texts, PARAMS)]
    got = [row["answer"] for row in sorted(found, key=lambda row: row["id"]) if row["id"] != 7]
    assert got == expected
    again = mp.cluster.generate_dataset(
        ray.data.from_items(ROWS, override_num_blocks=2), "pond-recall", params=PARAMS, out=tmp_path, **OPTIONS
    ).take_all()
    assert [row["id"] for row in again] == [7], "only what has no answer"
    assert again[0]["error"] is None
