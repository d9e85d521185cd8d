"""A process that stores turn after turn until it is killed; arguments: FOLDER LIMIT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.helpers.engine.sessions import ask, open_engine, said, words

#: Rounds of conversations that begin with other words; then they come again.
ROUNDS = 2

if __name__ == "__main__":
    torch.set_num_threads(1)
    engine = open_engine(Path(sys.argv[1]), cache_disk=int(sys.argv[2]))
    print("ready", flush=True)
    round_ = 0
    while True:
        for session in range(5):
            ids = words(40 + session, session) + words(round_ % ROUNDS, 99)
            for turn in range(3):
                ids += said(ask(engine, ids)) + words(4, 10 * session + turn)
        round_ += 1
