"""Published figures of methods, measured here: on a GPU, with the models that they were published for.

    python benchmarks/quality/published_rows.py --ruler data/ruler --samples 500 --out out/published

The figures are in `published_rows.toml`. With `--ruler` the tasks are RULER's own files, as its scripts write them
(`data/ruler/4096/niah_single_1/validation.jsonl`); without it they are the eleven tasks of its kinds that are made
here, whose scores are not RULER's: then what compression loses is compared, and not the scores. Prompts stand in the
model's chat template where it has one, as kvpress asks. A finished row is a line of `rows.jsonl` in `--out` and is not
run again; within a row every answered question stays. `--model` puts another model in the place of all, to see it run:
its figures are not comparable.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millpond.cli.options import load_on
from millpond.errors import DataError, MillpondError, OptionError, unknown
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table
from millpond_lab.evals.candidates.candidate import find_candidate
from millpond_lab.evals.decoding.record import Record
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.run import run
from millpond_lab.evals.harness.summary import Interval, paired_interval, read_samples, share_interval
from millpond_lab.evals.spec import Spec

ROWS = Path(__file__).with_suffix(".toml")
#: RULER's kinds of tasks that are made here, with the options that make them the task of that name.
GENERATED = {
    "niah_single_1": "niah_single:variant=1",
    "niah_single_2": "niah_single:variant=2",
    "niah_single_3": "niah_single:variant=3",
    "niah_multikey_1": "niah_multikey:variant=1",
    "niah_multikey_2": "niah_multikey:variant=2",
    "niah_multikey_3": "niah_multikey:variant=3",
    "niah_multivalue": "niah_multivalue",
    "niah_multiquery": "niah_multiquery",
    "vt": "tracking",
    "cwe": "common_words",
    "fwe": "frequent_words",
}
FILES = (*GENERATED, "qa_1", "qa_2")
#: Where the question of RULER's questions about documents begins for kvpress.
QA_BEGINS = "Answer the question based on the given documents."


@dataclass(frozen=True)
class Published:
    """A row of `published_rows.toml`, which says what its fields are."""

    name: str
    paper: str
    arxiv: str
    source: str
    model: str
    length: int
    n: int
    method: str
    budget: str
    removed: float
    compressed: float
    tolerance: float
    full: float | None = None
    note: str = ""


def read_rows(path: Path = ROWS) -> list[Published]:
    """The rows of a file.

    Raises:
        DataError: a field that is missing or that no row has, or a name twice.
    """
    known = {field.name for field in fields(Published)}
    rows = []
    for number, found in enumerate(tomllib.loads(path.read_text(encoding="utf-8"))["rows"], start=1):
        if not found.keys() <= known:
            raise DataError(f"{path}, row {number}: {unknown('field', min(found.keys() - known), known)}")
        try:
            rows.append(Published(**found))
        except TypeError as error:
            raise DataError(f"{path}, row {number}: {error}; add it") from error
    if len({row.name for row in rows}) < len(rows):
        raise DataError(f"{path} has two rows of one name; rename one")
    return rows


@dataclass(frozen=True)
class Settings:
    """How rows are measured; those of one `rows.jsonl` may differ in all of it.

    Attributes:
        model: in place of each row's own, or "". length: of the texts, or 0 for each row's own.
        samples: of each task. ruler: folder of RULER's files, or "". options: of a method by its name, added to rows.
    """

    model: str = ""
    length: int = 0
    samples: int = 50
    ruler: str = ""
    seed: int = 7
    dtype: str = "bf16"
    batch_size: int = 4
    options: tuple[Spec, ...] = ()

    def method(self, row: Published) -> Spec:
        """The row's method, with the options that were added."""
        spec = Spec.parse(row.method)
        more = [each.options for each in self.options if each.name == spec.name]
        return Spec(spec.name, {**spec.options, **{name: value for own in more for name, value in own.items()}})

    def key(self, row: Published) -> dict[str, Any]:
        """What a finished row is known by."""
        return {
            "row": row.name,
            "model": self.model or row.model,
            "method": str(self.method(row)),
            "budget": row.budget,
            "tasks": "RULER's files" if self.ruler else "made here",
            "length": self.length or row.length,
            "samples": self.samples,
            "seed": self.seed,
            "dtype": self.dtype,
        }

    def tasks(self, row: Published, chat: bool) -> dict[str, Spec]:
        """The tasks of a row by RULER's names, each in the model's chat template if `chat`.

        Raises:
            DataError: a file of RULER is missing.
        """
        length = self.length or row.length
        made = {name: Spec.parse(f"{spec}:length={length}") for name, spec in GENERATED.items()}
        plain = {name: self._file(name, length) for name in FILES} if self.ruler else made
        if not chat:
            return plain
        return {name: Spec("chat", {"of": str(spec), "messages": "1"}) for name, spec in plain.items()}

    def plan(self, row: Published, chat: bool) -> EvalPlan:
        """What is run for a row; a method that needs a budget where the row has none may keep all.

        Raises:
            OptionError, DataError: a method, an option or a file that is not there.
        """
        method, key = self.method(row), self.key(row)
        free = bool(find_candidate(method).default_budget) and not row.budget
        budget = "100%" if free else row.budget
        return EvalPlan(
            key["model"],
            [Spec("full"), method],
            list(self.tasks(row, chat).values()),
            [budget] if budget else None,
            protocols=("agnostic",),
            samples=self.samples,
            seed=self.seed,
            batch_size=self.batch_size,
            dtype=self.dtype,
        )

    def _file(self, name: str, length: int) -> Spec:
        path = Path(self.ruler) / str(length) / name / "validation.jsonl"
        if not path.exists():
            raise DataError(f"{path} is not there; RULER's scripts write it, or leave out --ruler")
        question = {"question": QA_BEGINS} if name.startswith("qa") else {}
        return Spec("ruler", {"path": str(path), "task": name, **question})


def measure(row: Published, settings: Settings, model: Any, tokenizer: Any, out: Path) -> dict[str, Any]:
    """The figures of a row: full and compressed on the same questions, what is lost, and what share left.

    Raises:
        OptionError, DataError, UnsupportedModelError: what cannot be run, see `millpond_lab.evals.harness.run.run`.
    """
    begun, key = time.perf_counter(), settings.key(row)
    plan = settings.plan(row, bool(getattr(tokenizer, "chat_template", None)))
    words = (key["model"], key["tasks"], settings.samples, settings.seed, settings.dtype)
    folder = out / "-".join(str(word).replace("/", "--").replace(" ", "_").replace("'", "") for word in words)
    run(plan, model, tokenizer, folder)
    found = read_samples(folder)
    full: dict[str, list[Record]] = {}
    less: dict[str, list[Record]] = {}
    for cell in plan.cells():
        side = full if cell.method == "full" else less
        side[cell.task] = [record for record in found if record.cell == cell.key]
    return {**key, **figures(full, less), "seconds": round(time.perf_counter() - begun, 1)}


def figures(full: Mapping[str, Sequence[Record]], less: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    """Scores in percent with 95 % intervals, of both sides and of the difference on the same questions.

    Args:
        full, less: records of the full cache and of the method, by task.
    """
    pairs = []
    for group, task in enumerate(less):
        before = {(record.sample, record.question): record for record in full[task]}
        pairs += [(group, before[record.sample, record.question], record) for record in less[task]]
    lost = np.array([own.score - record.score for _, own, record in pairs])
    held = [record.kept_share for _, _, record in pairs if record.full_kv_bytes]
    return {
        "full": _percent(share_interval(np.array([own.score for _, own, _ in pairs]))),
        "compressed": _percent(share_interval(np.array([record.score for _, _, record in pairs]))),
        "lost": _percent(paired_interval(lost, groups=np.array([group for group, _, _ in pairs]))),
        "removed": round(1 - sum(held) / len(held), 4) if held else None,
        "n": len(pairs),
        "failures": sum(bool(own.failure or record.failure) for _, own, record in pairs),
    }


def _percent(found: Interval) -> list[float]:
    return [round(100 * value, 2) for value in (found.mean, found.low, found.high)]


def verdict(row: Published, found: dict[str, Any]) -> str:
    """Whether a measured row is within the tolerance of the published one, as far as the two can be compared.

    A figure is within if its whole interval is, outside if none of it is, and else undecided.
    """
    if found["model"] != row.model:
        return "another model: published figures are not comparable"
    if found["length"] != row.length:
        return "another length: published figures are not comparable"
    if found["failures"]:
        return f"undecided: {found['failures']} questions failed"
    own = found["tasks"] == "RULER's files"
    compared = {"full": row.full, "compressed": row.compressed} if own else {}
    compared["lost"] = None if row.full is None else row.full - row.compressed
    said = {name: _judged(found[name], value, row.tolerance) for name, value in compared.items() if value is not None}
    if not said:
        return "not comparable: the tasks are made here, and the source has no full figure to tell the loss by"
    for answer in ("outside", "undecided"):
        names = [name for name, each in said.items() if each == answer]
        if names:
            wide = "; the intervals are too wide, raise --samples" if answer == "undecided" else ""
            return f"{answer}: {', '.join(names)}{wide}"
    return f"within: {', '.join(said)}"


def _judged(measured: Sequence[float], published: float, tolerance: float) -> str:
    _, low, high = measured
    if low >= published - tolerance and high <= published + tolerance:
        return "within"
    return "outside" if high < published - tolerance or low > published + tolerance else "undecided"


class RowFile:
    """Finished rows, one a line; a half-written last line is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = path.read_bytes() if path.exists() else b""
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            path.write_bytes(data[:whole])
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in data[:whole].splitlines()]

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """The finished row of these settings."""
        return next((row for row in self.rows if row.items() >= key.items()), None)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.rows.append(row)


class Loader:
    """One model at a time, with its tokenizer."""

    def __init__(self, dtype: str, device: str | None) -> None:
        self.dtype, self.device = dtype, device
        self.name = ""
        self.pair: tuple[Any, Any] = (None, None)

    def get(self, name: str) -> tuple[Any, Any]:
        """The model of that name; the one before is freed first."""
        if name != self.name:
            self.name, self.pair = "", (None, None)
            self.pair = load_on(name, self.dtype, self.device)
            self.name = name
        return self.pair


def measured_rows(
    rows: Sequence[Published], settings: Settings, loader: Loader, out: Path
) -> Iterator[tuple[Published, dict[str, Any] | None, str]]:
    """Each row with what was measured, or with None and the reason why it is left out; models one after another."""
    done, models = RowFile(out / "rows.jsonl"), [row.model for row in rows]
    for row in sorted(rows, key=lambda row: models.index(row.model)):
        found, reason = done.find(settings.key(row)), ""
        try:
            if found is None:
                settings.plan(row, chat=False)  # refused before a model is loaded
                model, tokenizer = loader.get(settings.model or row.model)
                measured = measure(row, settings, model, tokenizer, out)
                machine = describe_machine()
                made = {"device": str(model.device), "hardware": machine.hardware, "software": machine.software}
                found = {**measured, **made}
                done.add(found)
        except MillpondError as error:
            reason = f"skipped: {str(error).partition(' Known: ')[0]}"  # without the names of all methods
        yield row, found, reason


def line(row: Published, found: dict[str, Any] | None, reason: str) -> tuple[str, ...]:
    """A row of the table."""
    published = f"{'?' if row.full is None else row.full} to {row.compressed} (removed {row.removed:.0%})"
    if found is None:
        return (row.name, f"{row.paper}, arXiv:{row.arxiv}", published, "", "", "", reason)
    full, less, lost = (
        f"{mean} ({low} to {high})" for mean, low, high in map(found.get, ("full", "compressed", "lost"))
    )
    removed = "?" if found["removed"] is None else f"{found['removed']:.0%}"
    measured = f"{full} to {less} (removed {removed})"
    said = verdict(row, found) + (f"; {row.note}" if row.note else "")
    asked = f"{found['n']}, {found['failures']} failed" if found["failures"] else str(found["n"])
    return (row.name, f"{row.paper}, arXiv:{row.arxiv}", published, measured, lost, asked, said)


HEADS = ("row", "paper", "published", "measured (95 %)", "lost (95 %)", "n", "published within the tolerance?")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="names, separated by commas; all by default")
    parser.add_argument("--model", default="", help="in place of each row's own, to see it run")
    parser.add_argument("--length", type=int, default=0, help="tokens of a text, in place of each row's own")
    parser.add_argument("--samples", type=int, default=50, help="questions of each task; kvpress has 500")
    parser.add_argument("--ruler", default="", help="folder of RULER's files, by length and task")
    parser.add_argument("--set", action="append", default=[], help="options of a method, as kvzap:NAME=VALUE")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; cuda if there is one")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--out", type=Path, default=Path("out/published"), help="an interrupted run goes on there")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    rows = {row.name: row for row in read_rows()}
    names = [name.strip() for name in args.rows.split(",")] if args.rows else [*rows]
    for name in names:
        if name not in rows:
            raise SystemExit(f"error: {unknown('row', name, rows)}")
    try:
        settings = Settings(
            args.model,
            args.length,
            args.samples,
            args.ruler,
            args.seed,
            args.dtype,
            args.batch_size,
            tuple(map(Spec.parse, args.set)),
        )
    except OptionError as error:
        raise SystemExit(f"error: {error}") from error
    lines = []
    loader = Loader(args.dtype, args.device)
    for row, found, reason in measured_rows([rows[name] for name in names], settings, loader, args.out):
        lines.append(line(row, found, reason))
        print(f"{row.name}: {lines[-1][-1]}", flush=True)
    print("\n" + markdown_table(HEADS, lines))


if __name__ == "__main__":
    main()
