"""Rows of kvpress's own presses on the board: the same prompts and scoring, in an environment of their own.

    benchmarks/peers/kvpress_env.sh
    python benchmarks/quality/board_peer.py --model smollm2-135m --tasks benchmarks/results/board-tasks.json \\
        --families "facts in prose" --rows benchmarks/results/board.json

A press reads each context by itself, so contexts take longer than those of `board.py`. Answers are written as they
come, and a run goes on where it stopped. Bytes are those that the peer's cache holds, of its own full cache: presses
that hide entries hold all of them, whatever their budget.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from board import ASKED, SEED, add_rows, rows_of, tasks_of

import millpond as mp
from millpond.models.load import resolve
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.evals.decoding.record import Cell
from millpond_lab.evals.peers.process import RestartingPeer
from millpond_lab.evals.peers.run import PeerPlan, run_peer
from millpond_lab.evals.spec import Spec, parse_specs

PRESSES = "SnapKVPress,AdaKVPress(SnapKVPress),ExpectedAttentionPress,KeyDiffPress,KVzipPress"
#: Families of tasks that a peer cannot be asked, and why.
CANNOT = {"turns": "its cache has no later turns", "stated facts": "it is not fed token by token"}
SCRIPT = Path(__file__).parents[1] / "peers" / "kvpress_eval.py"


def peer_rows(cells: Sequence[Cell], family: str, folder: Path) -> list[dict[str, Any]]:
    """A row for each press and budget of which contexts were answered; its method is named with the peer before it."""
    rows = rows_of(cells, family, folder, width=0)
    return [row | {"setting": [f"kvpress/{row['setting'][0]}", *row["setting"][1:]]} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", help="of the model in the results; its own by default")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--tasks", type=Path, required=True, help="rows of board_tasks.py")
    parser.add_argument("--families", help="some of the solved ones, separated by semicolons")
    parser.add_argument("--contexts", type=int, default=25)
    parser.add_argument("--presses", default=PRESSES)
    parser.add_argument("--budget", default="20%,10%")
    parser.add_argument("--python", type=Path, default=Path("build/kvpress/bin/python"), help="of kvpress_env.sh")
    parser.add_argument("--out", type=Path, default=Path("out/board"), help="folder of the answers")
    parser.add_argument("--rows", type=Path, required=True, help="as .json; the tables lie next to it, as .md")
    args = parser.parse_args()
    name, methods = args.name or args.model, parse_specs(f"full,{args.presses}", "--presses")
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    start = [str(args.python), "-W", "ignore", str(SCRIPT), "--model", resolve(args.model), "--dtype", args.dtype]
    peer = RestartingPeer([*start, "--device", "cpu", "--threads", threads], list(map(str, methods)))
    model, tokenizer = mp.load_model(args.model, args.dtype), mp.load_tokenizer(args.model)
    for form in tasks_of(args.tasks, name, args.families.split(";") if args.families else None):
        if form["family"] in CANNOT:
            print(f"{name}: {form['family']}: left out: {CANNOT[form['family']]}", flush=True)
            continue
        asked, begun = ASKED if "questions=" in form["task"] else 1, time.perf_counter()
        plan = PeerPlan(
            name,
            methods,
            [Spec.parse(form["task"])],
            args.budget.split(","),
            protocols=(form["protocol"],),
            samples=args.contexts * ASKED // asked,
            seed=SEED,
            batch_size=1,
            dtype=args.dtype,
            peer=peer.name,
        )
        folder = args.out / name / f"{plan.samples}"
        try:
            run_peer(plan, peer, model, tokenizer, folder)
        finally:  # what an interrupted run has answered is kept too
            fresh = peer_rows(plan.cells(), form["family"], folder)
            note = {"dtype": args.dtype, "seed": SEED, "machine": asdict(describe_machine())}
            add_rows(args.rows, name, fresh, note)
        print(f"{name}: {form['family']}: {len(fresh)} presses, {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
