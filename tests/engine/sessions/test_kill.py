"""A process that stores turns is killed at random moments: nothing is broken, and its sessions go on."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.engine.sessions import ask, kv, open_engine, said, stored, words

LIMIT = 400_000


@pytest.mark.slow
def test_a_killed_process_leaves_whole_turns(tmp_path: Path) -> None:
    draw, plain, restored = random.Random(0), open_engine(None), 0
    for _ in range(4):
        command = [sys.executable, "-m", "tests.helpers.engine.sessions_peer", str(tmp_path), str(LIMIT)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            until = time.monotonic() + draw.uniform(0.05, 1.5)
            while time.monotonic() < until:
                assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*") if path.exists()) <= LIMIT
            process.kill()
        engine = open_engine(tmp_path, cache_disk=LIMIT)
        assert not list(tmp_path.glob("*/*/*.part"))
        for session in range(5):
            ids = words(40 + session, session)
            ids += said(ask(plain, ids)) + words(4, 10 * session)
            output = ask(engine, ids)
            restored += kv(output).restored_tokens > 0
        assert engine.sessions is not None
        assert engine.sessions.stats().torn == 0
        engine.close()
    assert stored(tmp_path)
    assert restored, "some turns outlived"
    plain.close()
