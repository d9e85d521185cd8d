"""Which tasks a model solves with its full cache, in which form: what the board is drawn up on.

    python benchmarks/quality/board_tasks.py --model smollm2-135m --rows benchmarks/results/board-tasks.json

Each family of tasks has forms, the hardest first: 4,096 tokens, plain or as a chat, then 2,048 and 1,024, and fewer
facts. They are run with the full cache until one reaches a score of .5; the first that does stands for its family. The
question is unknown when the context is read, except that `turns` asks one after another. Each context is asked four
questions, or as many more contexts are read as a form asks fewer. Intervals are of the bootstrap over contexts, as
questions of one context are not independent. Rows are written as they come, and a run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import millpond as mp
from millpond.errors import unknown
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table
from millpond_lab.evals.decoding.record import Protocol, Record
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.run import run
from millpond_lab.evals.harness.summary import by_sample, read_samples, resampled_interval, share_interval
from millpond_lab.evals.spec import Spec

SEED, ASKED, SOLVED = 7, 4, 0.5


@dataclass(frozen=True)
class Form:
    """One way to ask a family of tasks."""

    family: str
    task: str
    protocol: Protocol = "agnostic"

    @property
    def questions(self) -> int:
        """Questions of a context."""
        found = re.search(r":questions=(\d+)", self.task)
        return int(found[1]) if found else 1

    @property
    def length(self) -> int:
        """Tokens of a context with a question and its answer."""
        found = re.search(r":length=(\d+)", self.task)
        return int(found[1]) if found else 0

    def contexts(self, least: int) -> int:
        """Contexts that give `ASKED` questions for each of `least` contexts."""
        return max(least, -(-ASKED * least // self.questions))


def _forms(family: str, task: str, *lengths: int, protocol: Protocol = "agnostic", chat: bool = True) -> list[Form]:
    """Plain and as a chat, length by length."""
    plain = [f"{task}:length={length}" for length in lengths]
    ways = [way for one in plain for way in ((one, f'chat:of="{one}"') if chat else (one,))]
    return [Form(family, way, protocol) for way in ways]


#: Families in the order in which they are run; of each, forms from hard to easy.
FORMS: tuple[Form, ...] = (
    *_forms("facts in prose", "prose_facts:questions=4", 4096, 2048, 1024),
    *_forms("chat facts", "chat_facts:questions=4", 4096, 2048, 1024, chat=False),
    *_forms("chat facts", "chat_facts:questions=4:begun=true", 2048, 1024, chat=False),
    *_forms("turns", "prose_facts:questions=4", 4096, 2048, 1024, protocol="turns"),
    *_forms("code", "code:questions=4", 4096, 2048, 1024, chat=False),
    *_forms("stated facts", "stated_facts:questions=4:prompt=0.8", 2048, 1024),
    *_forms("instructions", "instructions:questions=4:rules=3", 2048, 1024, chat=False),
    *_forms("instructions", "instructions:questions=4:rules=2:examples=2", 2048, 1024, chat=False),
    *_forms("instructions", "instructions:questions=4:rules=1:examples=4", 2048, 1024, chat=False),
    *_forms("multikey", "niah_multikey:questions=4", 4096, 2048, 1024),
    *_forms("phrases in prose", "prose_facts:questions=4:answer=phrase", 4096, 2048),
    *_forms("recall", "recall:questions=4:pairs=8", 4096, 2048, 1024),
    *_forms("multivalue", "niah_multivalue:questions=4:values=2", 4096, 2048, 1024),
    *_forms("multiquery", "niah_multiquery:questions=4:queries=2", 4096, 2048, 1024),
    *_forms("tracking", "tracking:questions=4:chains=4:hops=1", 2048, 1024),
    *_forms("copy", "copy:questions=4", 2048, 1024),
    *_forms("single, repeated sentences", "niah_single", 4096, 2048),
    *_forms("single, prose", "niah_single:variant=2", 4096, 2048),
    *_forms("single, identifiers", "niah_single:variant=3", 4096, 2048),
    *_forms("nothing but needles", "niah_multikey:variant=2:questions=4", 2048, 1024),
    *_forms("nothing but identifiers", "niah_multikey:variant=3:questions=4", 2048, 1024),
    *_forms("common words", "common_words", 2048, 1024),
    *_forms("frequent words", "frequent_words", 2048, 1024),
)


def families(forms: Sequence[Form]) -> dict[str, list[Form]]:
    """Forms by family, in their order."""
    found: dict[str, list[Form]] = {}
    for form in forms:
        found.setdefault(form.family, []).append(form)
    return found


def scored(form: Form, records: Sequence[Record]) -> dict[str, Any]:
    """What the full cache scores on a form: the mean over questions, and intervals over contexts."""
    each = list(by_sample(records).values())
    sums = np.array([sum(record.score for record in own) for own in each])
    weights = np.array([float(len(own)) for own in each])
    drawn, wilson = resampled_interval(sums, weights, SEED), share_interval(sums / weights, weights)
    return {
        **asdict(form),
        "contexts": len(each),
        "questions": len(records),
        "failures": sum(bool(record.failure) for record in records),
        "tokens": float(np.mean([record.prompt_tokens for record in records])),
        "score": drawn.mean,
        "bootstrap": [drawn.low, drawn.high],
        "wilson": [wilson.low, wilson.high],
        "solved": drawn.mean >= SOLVED,
    }


def solved(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each family the first form that is solved; families of which none is are left out."""
    chosen: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["solved"]:
            chosen.setdefault(row["family"], row)
    return list(chosen.values())


class Runner:
    """Runs forms of one model with the full cache."""

    def __init__(self, model: str, dtype: str, folder: Path, contexts: int) -> None:
        self.name, self.dtype, self.folder, self.contexts = model, dtype, folder, contexts
        self.model, self.tokenizer = mp.load_model(model, dtype), mp.load_tokenizer(model)

    def row(self, form: Form) -> dict[str, Any]:
        """The row of a form; answers that are in the folder already are not decoded again."""
        count = form.contexts(self.contexts)
        spec = Spec.parse(form.task)
        plan = EvalPlan(
            self.name,
            [Spec("full")],
            [spec],
            protocols=(form.protocol,),
            samples=count,
            seed=SEED,
            batch_size=ASKED,
            dtype=self.dtype,
        )
        folder, begun = self.folder / f"{count}", time.process_time()
        run(plan, self.model, self.tokenizer, folder)
        (cell,) = plan.cells()
        records = [record for record in read_samples(folder) if record.cell == cell.key]
        return {**scored(form, records), "cpu_seconds": round(time.process_time() - begun, 1)}

    def rows(self, forms: Sequence[Form], known: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Rows family by family; each family ends with the first form that is solved."""
        for own in families(forms).values():
            for form in own:
                before = known.get(_key(asdict(form)))
                done = before is not None and before["contexts"] >= form.contexts(self.contexts)
                row = before if before is not None and done else self.row(form)
                yield row
                if row["solved"]:
                    break


def _key(row: dict[str, Any]) -> str:
    return f"{row['task']} {row['protocol']}"


def page(report: dict[str, Any]) -> str:
    """A table for each model: every form that was run."""
    parts = ["# Tasks of the board, with the full cache\n"]
    for name, own in report["models"].items():
        chosen = {_key(row) for row in solved(own["rows"])}
        lines = [
            (
                row["family"],
                f"`{row['task']}`",
                row["protocol"],
                f"{row['questions']} on {row['contexts']}",
                f"{row['tokens']:,.0f}",
                f"{row['score']:.2f}",
                f"{row['bootstrap'][0]:.2f} to {row['bootstrap'][1]:.2f}",
                "yes" if _key(row) in chosen else "",
            )
            for row in own["rows"]
        ]
        heads = ("family", "form", "protocol", "questions on contexts", "tokens", "score", "95 %", "on the board")
        parts.append(f"## {name}\n\nFamilies that are solved: {len(chosen)}.\n\n{markdown_table(heads, lines)}")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", help="of the model in the results; its own by default")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--contexts", type=int, default=25, help="of a form that asks four questions of each")
    parser.add_argument("--families", help="some of them, separated by semicolons")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest forms: fewer for a first look")
    parser.add_argument("--out", type=Path, default=Path("out/board"), help="folder of the answers")
    parser.add_argument("--rows", type=Path, required=True, help="as .json; the tables lie next to it, as .md")
    args = parser.parse_args()
    named = args.families.split(";") if args.families else [*families(FORMS)]
    for family in named:
        if family not in families(FORMS):
            raise unknown("family", family, families(FORMS))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    name = args.name or args.model
    report = json.loads(args.rows.read_text(encoding="utf-8")) if args.rows.exists() else {"models": {}}
    own = report["models"].setdefault(name, {"rows": []})
    own |= {"dtype": args.dtype, "seed": SEED, "machine": asdict(describe_machine())}
    forms = [form for form in FORMS if form.family in named and form.length <= args.longest]
    known = {_key(row): row for row in own["rows"]}
    order = {_key(asdict(form)): place for place, form in enumerate(FORMS)}
    runner = Runner(args.model, args.dtype, args.out / name, args.contexts)
    for row in runner.rows(forms, dict(known)):
        known[_key(row)] = row
        own["rows"] = sorted(known.values(), key=lambda each: order.get(_key(each), len(order)))
        args.rows.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        args.rows.with_suffix(".md").write_text(page(report), encoding="utf-8")
        print(f"{name}: {row['task']} {row['protocol']}: {row['score']:.2f} of {row['questions']}", flush=True)


if __name__ == "__main__":
    main()
