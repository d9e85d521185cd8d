"""A process that stores turns is killed at random moments: nothing is broken, and its sessions go on."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.engine.sessions import ask, kv, open_engine, said, stored, words
from tests.helpers.engine.sessions_killed import DEPTH, SESSIONS, conversation, engine_that_stores, lines, read_before
from tests.helpers.engine.sessions_peer import ROUNDS

LIMIT = 400_000


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where it is gone, or has another name by now."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@pytest.mark.slow
def test_a_killed_process_leaves_whole_turns(tmp_path: Path) -> None:
    draw, plain, restored = random.Random(0), open_engine(None), 0
    for _ in range(4):
        command = [sys.executable, "-m", "tests.helpers.engine.sessions_peer", str(tmp_path), str(LIMIT)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            until = time.monotonic() + draw.uniform(0.05, 1.5)
            try:
                while time.monotonic() < until:
                    assert sum(map(size_of, tmp_path.glob("*/*/*"))) <= LIMIT
            finally:
                process.kill()
        engine = open_engine(tmp_path, cache_disk=LIMIT)
        assert not list(tmp_path.glob("*/*/*.part"))
        for session, part in product(range(5), range(ROUNDS)):
            ids = words(40 + session, session) + words(part, 99)
            ids += said(ask(plain, ids)) + words(4, 10 * session)
            output = ask(engine, ids)
            restored += kv(output).restored_tokens > 0
        assert engine.sessions is not None
        assert engine.sessions.stats().torn == 0
        engine.close()
    assert stored(tmp_path)
    assert restored, "some turns outlived"
    plain.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "codes"])
def test_twenty_conversations_of_a_killed_process_say_what_undisturbed_ones_say(kind: str, tmp_path: Path) -> None:
    """20 sessions of 10 turns; the process is killed three times after a drawn number of answers, and goes on."""
    undisturbed, expected = (
        engine_that_stores(tmp_path / "undisturbed", kind),
        [list[list[int]]() for _ in range(SESSIONS)],
    )
    for _ in range(DEPTH):
        for session, answers in enumerate(expected):
            answers.append(said(ask(undisturbed, conversation(session, answers))))
    undisturbed.close()
    log, draw = tmp_path / "log", random.Random(3)
    command = [sys.executable, "-m", "tests.helpers.engine.sessions_killed", str(tmp_path / "killed"), str(log), kind]
    for _ in range(3):
        begun = len(lines(log))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(draw.randrange(10, 50)):
                process.stdout.readline()
            time.sleep(draw.uniform(0, 0.02))  # somewhere in the next answer, or while it is stored
            process.kill()
        assert begun < len(lines(log)) < SESSIONS * DEPTH
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    found: list[list[list[int]]] = [[] for _ in range(SESSIONS)]
    for session, restored, answer in lines(log):
        ids = conversation(session, found[session])
        assert restored == read_before(ids, found[session]), "each goes on from the turn before, killed or not"
        found[session].append(answer)
    assert found == expected
    assert not list((tmp_path / "killed").glob("*/*/*.part"))
