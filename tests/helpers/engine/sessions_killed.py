"""A process that leads conversations, writes down each answer whose turn is stored, and goes on from what is written.

Arguments: FOLDER LOG KIND; kinds of turns: "plain" or "codes".
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from millpond.engine.engine import Engine
from tests.helpers.engine.coded import engine_of
from tests.helpers.engine.sessions import ask, kv, open_engine, said, words

#: Conversations, their turns, and tokens of the first prompt and of what a user adds.
SESSIONS, DEPTH, BEGIN, USER = 20, 10, 24, 5


def conversation(session: int, answers: list[list[int]]) -> list[int]:
    """The next prompt of a conversation with these answers so far."""
    ids = words(BEGIN + session, session)
    for turn, answer in enumerate(answers):
        ids += answer + words(USER, 1000 * (session + 1) + turn)
    return ids


def read_before(ids: list[int], answers: list[list[int]]) -> int:
    """Tokens of a prompt that the turn before it has read."""
    return len(ids) - USER - 1 if answers else 0


def engine_that_stores(folder: Path, kind: str) -> Engine:
    """An engine whose turns are stored as they are, or in codes."""
    return open_engine(folder) if kind == "plain" else engine_of(cache_dir=folder)


def lines(log: Path) -> list[list[Any]]:
    """Session, tokens that came from a stored turn, and answer, in the order of time."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, log = map(Path, sys.argv[1:3])
    done: list[list[list[int]]] = [[] for _ in range(SESSIONS)]
    for session, _, answer in lines(log):
        done[session].append(answer)
    engine = engine_that_stores(folder, sys.argv[3])
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    print("ready", flush=True)
    for turn in range(DEPTH):
        for session, answers in enumerate(done):
            if len(answers) == turn:
                output = ask(engine, conversation(session, answers))
                answers.append(said(output))
                os.write(file, (json.dumps([session, kv(output).restored_tokens, said(output)]) + "\n").encode())
                print(session, flush=True)
    engine.close()
