"""The board: settings of the cache on the tasks that a model solves with its full cache, and the bytes that each holds.

    python benchmarks/quality/board.py --model smollm2-135m --tasks benchmarks/results/board-tasks.json \\
        --settings default --rows benchmarks/results/board.json

`--setting` adds a setting of your own, named as a row of the board is, and `--plugin` a file with a method of your own.
The tasks are those that `board_tasks.py` found solved. Each context is read once, with the full cache, and every
setting that acts at its end is given what was read; then its questions are asked, which no setting has seen. Answers
are written as they come, so a run goes on where it stopped; rows are written after each task, and hold the score of
each context, so that `default_choice.py` and others can compare settings on the same contexts.

Bytes are those that a cache in bf16 would hold, over all of that cache, where the first question begins: a run in
float32 counts numbers that are not coded with 2 bytes. Intervals are of the bootstrap over contexts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from board_tasks import ASKED, SEED, solved

import millpond as mp
from millpond.errors import unknown
from millpond.plugin_file import load_plugin
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.evals.decoding.record import CLAIMED, Cell, Record
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.run import run
from millpond_lab.evals.harness.summary import by_sample, read_samples
from millpond_lab.evals.report.board import FULL, Setting, board_page
from millpond_lab.evals.spec import Spec
from millpond_lab.evals.task import TASKS

#: Bytes of a number of the full cache that shares are of.
WIDTH = 2

#: What a default could be, at most 55 % of the bytes: everything in few bits.
DEFAULT: tuple[Setting, ...] = (
    Setting("full", codec="int8"),
    Setting("full", codec="int8+int4"),
    Setting("full", codec="int4"),
    Setting("full", codec="rotated4"),
    Setting("full", codec="rotated3"),
    Setting("full", codec="rotated2"),
)
#: Fewer entries in 4 bits: about 20, 10 and 5 % of the bytes, and a tenth in plain numbers.
EVICTING: tuple[Setting, ...] = (
    *(Setting("kvzip", budget, "rotated4") for budget in ("60%", "32%", "14%")),
    Setting("kvzip", "10%"),
    Setting("snapkv", "32%", "rotated4"),
    Setting("h2o", "32%", "rotated4"),
    Setting("keydiff", "32%", "rotated4"),
    Setting("ada", "20%, at least 512", "rotated4"),
)
#: Methods that are compared at equal bytes, in plain numbers, and those that are at a twentieth of them too.
METHODS = (
    "h2o",
    "snapkv",
    "ada",
    "pyramidkv",
    "criticalkv",
    "cake",
    "lava",
    "keydiff",
    "expected_attention",
    "defensivekv",
    "defensivekv:across=true",
    "random_attention",
    "streaming",
    "attention_matching",
    "kvzip",
)
FEWEST = ("defensivekv:across=true", "attention_matching", "kvzip")
#: Texts that wait or travel in a storage codec, about 16, 12, 11, 10, 9, 8 and 6 % of the bytes.
STORED: tuple[Setting, ...] = tuple(Setting(f"stored:bits={bits:g}") for bits in (2, 1.5, 1.25, 1.1, 1, 0.75, 0.5))
#: A reference of other codes; what they take is claimed and not stored.
FORMATS: tuple[Setting, ...] = (
    Setting("turboquant:bits=4"),
    Setting("turboquant:bits=4:unbiased=true"),
    Setting("turboquant:bits=3"),
    Setting("turboquant:bits=2"),
)
#: Shares of the entries that take 20, 10 and 5 % of the bytes in plain numbers.
EQUAL: tuple[Setting, ...] = (
    *(Setting(method, budget) for budget in ("20%", "10%") for method in METHODS),
    *(Setting(method, "5%") for method in FEWEST),
)
#: What acts while a text is written, in plain numbers: for facts that stand in it.
WRITING: tuple[Setting, ...] = tuple(
    Setting(method, "25%")
    for method in ("h2o", "snapkv:decode=evict", "rkv", "vase", "triattention", "random_attention", "streaming")
)
#: The default, and the most that keeps nearly all of it in fewer bytes.
CHOSEN: tuple[Setting, ...] = (Setting("full", codec="int8"), Setting("full", codec="rotated4"))
GROUPS = {
    "default": DEFAULT,
    "chosen": CHOSEN,
    "stored": STORED,
    "evicting": EVICTING,
    "formats": FORMATS,
    "equal": EQUAL,
    "writing": WRITING,
}

# ---------------------------------------------------------------------- rows


def row_of(cell: Cell, family: str, records: Sequence[Record], width: int) -> dict[str, Any]:
    """What is kept of one setting on one task: the mean share of the bytes, and the score of each context.

    Contexts are in the order in which they are read, so that those of an interrupted run are the first of a whole one.

    Args:
        width: bytes of a number of the model; 0 for what tells no bytes of bf16: those of the cache itself then.
    """
    each = list(by_sample(records).values())
    shares = [_share(own[0], width) for own in each]
    return {
        "setting": [cell.method, cell.budget, cell.codec],
        "family": family,
        "task": cell.task,
        "protocol": cell.protocol,
        "questions": len(records),
        "failures": sum(bool(record.failure) for record in records),
        "bytes": float(np.mean(shares)),
        "scores": [round(float(np.mean([record.score for record in own])), 4) for own in each],
    }


def _share(record: Record, width: int) -> float:
    held = record.bf16_kv_bytes * width / WIDTH if width else record.kv_bytes
    return record.extra.get(CLAIMED, held / record.full_kv_bytes)


def rows_of(cells: Sequence[Cell], family: str, folder: Path, width: int) -> list[dict[str, Any]]:
    """A row for each setting of which contexts were answered in full: the first ones, as they are read in order."""
    records: dict[str, list[Record]] = {}
    for record in read_samples(folder):
        records.setdefault(record.cell, []).append(record)
    return [row_of(cell, family, records[cell.key], width) for cell in cells if records.get(cell.key)]


# ---------------------------------------------------------------------- running


def tasks_of(path: Path, name: str, families: Sequence[str] | None) -> list[dict[str, Any]]:
    """The solved forms of a model, of the named families in their order.

    Raises:
        OptionError: `path` has no rows of the model, or none of a family that it solves.
    """
    models = json.loads(path.read_text(encoding="utf-8"))["models"]
    if name not in models:
        raise unknown("model", name, models)
    found = {row["family"]: row for row in solved(models[name]["rows"])}
    for family in families or ():
        if family not in found:
            raise unknown("solved family", family, found)
    return [found[family] for family in (families or found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", help="of the model in the results; its own by default")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--tasks", type=Path, required=True, help="rows of board_tasks.py")
    parser.add_argument("--families", help="some of the solved ones, separated by semicolons")
    parser.add_argument("--contexts", type=int, default=25, help="of a form that asks four questions of each")
    parser.add_argument("--settings", help=f"{', '.join(GROUPS)}; several separated by commas; default if no --setting")
    parser.add_argument("--setting", action="append", help='one more, as "h2o 32%% rotated4"; may be repeated')
    parser.add_argument("--plugin", type=Path, help="a Python file with methods or tasks of your own")
    parser.add_argument("--out", type=Path, default=Path("out/board"), help="folder of the answers")
    parser.add_argument("--rows", type=Path, required=True, help="as .json; the tables lie next to it, as .md")
    args = parser.parse_args()
    groups = args.settings.split(",") if args.settings else [] if args.setting else ["default"]
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--settings {', '.join(sorted(unknown))}: the groups are {', '.join(GROUPS)}")
    load_plugin(args.plugin, TASKS)
    own = [Setting.parse(text) for text in args.setting or ()]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    name = args.name or args.model
    settings = list(dict.fromkeys([FULL, *(setting for group in groups for setting in GROUPS[group]), *own]))
    model, tokenizer = mp.load_model(args.model, args.dtype), mp.load_tokenizer(args.model)
    for form in tasks_of(args.tasks, name, args.families.split(";") if args.families else None):
        asked = ASKED if "questions=" in form["task"] else 1
        plan = EvalPlan(
            name,
            [Spec.parse(method) for method in dict.fromkeys(setting.method for setting in settings)],
            [Spec.parse(form["task"])],
            budgets=[budget for budget in dict.fromkeys(setting.budget for setting in settings) if budget] or None,
            codecs=list(dict.fromkeys(setting.codec for setting in settings)),
            protocols=(form["protocol"],),
            samples=args.contexts * ASKED // asked,
            seed=SEED,
            batch_size=ASKED,
            dtype=args.dtype,
            only=settings,
        )
        folder, begun = args.out / name / f"{plan.samples}", time.process_time()
        try:
            run(plan, model, tokenizer, folder)
        finally:  # what an interrupted run has answered is kept too
            fresh = rows_of(plan.cells(), form["family"], folder, model.dtype.itemsize)
            add_rows(args.rows, name, fresh, {"dtype": args.dtype, "seed": SEED, "machine": asdict(describe_machine())})
        print(f"{name}: {form['family']}: {len(fresh)} settings, {time.process_time() - begun:.0f} CPU s", flush=True)


def add_rows(path: Path, name: str, fresh: Sequence[dict[str, Any]], note: dict[str, Any]) -> None:
    """Add rows to the results, in place of those of the same setting and task.

    A row of more contexts stays: a short run beside the board must not take the full cache's row from the others. A row
    of another processor than the first ones' names it.
    """
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": {}}
    own = report["models"].setdefault(name, {**note, "rows": []})
    cpu = note["machine"]["cpu"]
    if own["rows"] and cpu != own["machine"]["cpu"]:  # the rows that are there were computed elsewhere
        fresh, note = [{**row, "cpu": cpu} for row in fresh], own
    known = {json.dumps([row["setting"], row["task"], row["protocol"]]): row for row in own["rows"]}
    for row in fresh:
        key = json.dumps([row["setting"], row["task"], row["protocol"]])
        if key not in known or len(known[key]["scores"]) <= len(row["scores"]):
            known[key] = row
    own |= {**note, "rows": list(known.values())}
    path.write_text(_lines(report), encoding="utf-8")
    path.with_suffix(".md").write_text(board_page(report), encoding="utf-8")


def _lines(report: dict[str, Any]) -> str:
    """The results as JSON, a row on each line."""
    models = []
    for name, own in report["models"].items():
        note = json.dumps({key: value for key, value in own.items() if key != "rows"})
        rows = ",\n".join(json.dumps(row) for row in own["rows"])
        models.append(f'{json.dumps(name)}: {note[:-1]}, "rows": [\n{rows}\n]}}')
    return '{"models": {\n' + ",\n".join(models) + "\n}}\n"


if __name__ == "__main__":
    main()
