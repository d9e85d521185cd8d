"""A run in the files of kvpress's evaluation: a folder of predictions, metrics and settings for each setting.

The layout is that of `evaluation/evaluate.py` in NVIDIA/kvpress at commit 8bb29b9 (version 0.5.4; the wheel of 0.5.5
holds no evaluation): `DATASET__DATA_DIR__MODEL__PRESS__RATIO[__fractionF][__query_aware]` with `predictions.csv`,
`metrics.json` and `config.yaml`, and a number as a folder of its own inside where a name is taken. What shows such
folders as a leaderboard is not in that repository.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import millpond
from millpond.budget import Budget
from millpond.errors import OptionError
from millpond_lab.evals.data.data_files import FileTask
from millpond_lab.evals.decoding.record import Cell, Record
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.store import RunStore, replace_text
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.spec import Spec
from millpond_lab.evals.task import TASKS

#: Folder of a run that holds the others.
FOLDER = "kvpress"
#: The data set of tasks that are not read from RULER's own files: a name that kvpress does not know.
OWN = "millpond"
#: Columns of `predictions.csv`; kvpress writes them in any order.
COLUMNS = ("task", "question", "answer_prefix", "answer", "max_new_tokens", "predicted_answer", "compression_ratio")
_QUERY_AWARE = {"aware": True, "agnostic": False}
_LONGEST_NAME = 100
#: What rounding may add to the share that a budget says.
_CLOSE = 0.01


@dataclass(frozen=True, slots=True)
class Setting:
    """What one folder is about: all tasks of a data set under one method.

    Attributes:
        dataset: `ruler`, or `OWN`. data_dir: the folder of RULER's files that is a number, their length; or "".
        chat: the tasks' texts stand in the model's chat template.
    """

    model: str
    dataset: str
    data_dir: str
    chat: bool
    method: str
    budget: str
    codec: str
    query_aware: bool
    seed: int


def check(plan: EvalPlan) -> None:
    """Refuse what these files cannot say.

    Raises:
        OptionError: a protocol or a kind of task that kvpress's evaluation does not have.
    """
    for protocol in plan.protocols:
        if protocol not in _QUERY_AWARE:
            raise OptionError(
                f"--format kvpress: its evaluation has no protocol {protocol!r}; name {' or '.join(_QUERY_AWARE)}"
            )
    for name, task in plan.built.items():
        if task.kind != "generate":
            raise OptionError(
                f"--format kvpress: task {name!r} is scored by {task.kind}, and its evaluation decodes answers; leave "
                "it out, or the format"
            )


@dataclass
class KvpressFolders:
    """Writes folders of kvpress's evaluation from the store of a run, which stays the source of all of them.

    Attributes:
        folder: that holds the others. dtype, device: of the model, for `config.yaml`.
    """

    folder: Path
    dtype: str
    device: str
    _written: dict[Path, tuple[Cell, ...]] = field(default_factory=dict)
    _rows: dict[str, int] = field(default_factory=dict)

    def write(self, store: RunStore, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Write every setting whose tasks are all answered and that is not written yet; each file appears whole.

        Args:
            samples: of every task of the store.
        """
        taken: dict[str, int] = {}
        for setting, cells in _settings(store).items():
            if not set(cells) <= set(store.finished()):
                continue
            records = {cell: store.of(cell) for cell in cells}
            removed = _removed(setting, [record for own in records.values() for record in own])
            fraction = self._fraction(setting, cells, samples)
            name = _name(setting, removed, fraction)
            place = self.folder / name / (str(taken[name]) if name in taken else "")
            taken[name] = taken.get(name, 0) + 1
            if self._written.get(place) != cells:
                place.mkdir(parents=True, exist_ok=True)
                replace_text(place / "predictions.csv", _predictions(records, samples))
                replace_text(place / "metrics.json", json.dumps(_metrics(setting, records, samples), indent=4))
                replace_text(place / "config.yaml", self._config(setting, removed, fraction))
                self._written[place] = cells

    def _fraction(self, setting: Setting, cells: Sequence[Cell], samples: Mapping[str, Sequence[Sample]]) -> float:
        """The share of the files' rows that was asked; 1 of tasks that are made here, which have no end."""
        if setting.dataset == OWN:
            return 1.0
        for cell in cells:
            if cell.task not in self._rows:
                task = _inner(cell.task).build(TASKS)
                assert isinstance(task, FileTask), "RULER's files are read by a task of files"
                self._rows[cell.task] = len(task.read())
        asked = sum(len(samples[cell.task]) for cell in cells)
        return round(asked / sum(self._rows[cell.task] for cell in cells), 6)

    def _config(self, setting: Setting, removed: float, fraction: float) -> str:
        """Kvpress's settings, with its names, as YAML: each value is JSON, which YAML includes."""
        ran = (
            f"millpond {millpond.__version__}: method={setting.method} budget={setting.budget or 'none'} "
            f"codec={setting.codec} prompts={'chat' if setting.chat else 'plain'}"
        )
        values: dict[str, Any] = {
            "dataset": setting.dataset,
            "data_dir": setting.data_dir or None,
            "model": setting.model,
            "device": self.device,
            "press_name": _press_name(setting),
            "compression_ratio": removed,
            "key_channel_compression_ratio": None,
            "fraction": fraction,
            "max_new_tokens": None,
            "max_context_length": None,
            "query_aware": setting.query_aware,
            "needle_depth": None,
            "compression_interval": None,
            "target_size": None,
            "hidden_states_buffer_size": None,
            "output_dir": str(self.folder),
            "log_level": "INFO",
            "model_kwargs": {"dtype": self.dtype},
            "press_init_command": ran,
            "seed": setting.seed,
            "fp8": False,
        }
        return "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items())


def _settings(store: RunStore) -> dict[Setting, tuple[Cell, ...]]:
    """The cells of each setting, in the store's order; those of peers and of what `check` refuses are left out."""
    found: dict[Setting, list[Cell]] = {}
    for cell in store.cells:
        if cell.peer == "millpond" and cell.protocol in _QUERY_AWARE and store.tasks[cell.task].kind == "generate":
            inner = _inner(cell.task)
            numbers = [part for part in reversed(Path(inner.options.get("path", "")).parent.parts) if part.isdecimal()]
            ours = inner.name != "ruler"
            setting = Setting(
                cell.model,
                OWN if ours else "ruler",
                "" if ours else next(iter(numbers), ""),
                Spec.parse(cell.task).name == "chat",
                cell.method,
                cell.budget,
                cell.codec,
                _QUERY_AWARE[cell.protocol],
                cell.seed,
            )
            found.setdefault(setting, []).append(cell)
    return {setting: tuple(cells) for setting, cells in found.items()}


def _inner(task: str) -> Spec:
    """A task without the conversation around it."""
    spec = Spec.parse(task)
    return Spec.parse(spec.options["of"]) if spec.name == "chat" and "of" in spec.options else spec


def _name(setting: Setting, removed: float, fraction: float) -> str:
    parts = [
        setting.dataset,
        setting.data_dir,
        re.sub(r"[/\\:]", "--", setting.model),
        _press_name(setting),
        f"{removed:.2f}",
        f"fraction{fraction:.3f}" if fraction < 1 else "",
        "query_aware" if setting.query_aware else "",
    ]
    return "__".join(filter(None, parts))


def _press_name(setting: Setting) -> str:
    """Ours by a name that is no press of kvpress, so that no row is taken for another's; the full cache by its own."""
    if setting.method == "full" and setting.codec == "auto":
        return "no_press"
    what = setting.method if setting.codec == "auto" else f"{setting.method}:{setting.codec}"
    name = re.sub(r"[^A-Za-z0-9.=+-]+", "_", f"millpond:{what}").strip("_")
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}-{hashlib.blake2b(what.encode(), digest_size=4).hexdigest()}"
    return name


def _removed(setting: Setting, records: Sequence[Record]) -> float:
    """The share that leaves: as a budget says it, or as measured where that is another one or depends on the text."""
    held = [record.kept_share for record in records if record.full_kv_bytes]
    measured = 1 - sum(held) / len(held) if held else 0.0
    budget = Budget.parse(setting.budget) if setting.budget else None
    if budget is not None and budget.kind == "ratio" and abs(1 - budget.amount - measured) <= _CLOSE:
        measured = 1 - budget.amount
    return round(measured, 6)


def _asked(records: Sequence[Record], samples: Sequence[Sample]) -> Iterator[tuple[Record, Sample, Question]]:
    by_name = {sample.id: sample for sample in samples}
    for record in records:
        sample = by_name[record.sample]
        yield record, sample, sample.questions[record.question]


def _task_name(cell: Cell, sample: Sample) -> str:
    """RULER's name of a task of its files; else the task with its options."""
    named = sample.facts.get("task") if _inner(cell.task).name == "ruler" else None
    return str(named or cell.task)


def _predictions(records: Mapping[Cell, Sequence[Record]], samples: Mapping[str, Sequence[Sample]]) -> str:
    """A row for each question; the context is left out, as kvpress does."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for cell, own in records.items():
        for record, sample, question in _asked(own, samples[cell.task]):
            table.writerow(
                [
                    _task_name(cell, sample),
                    question.text,
                    "",  # it stands at the end of the question
                    json.dumps(question.references, ensure_ascii=False),
                    question.max_new_tokens,
                    record.answer,
                    round(1 - record.kept_share, 6) if record.full_kv_bytes else "",
                ]
            )
    return text.getvalue().removesuffix("\n")


def _metrics(
    setting: Setting, records: Mapping[Cell, Sequence[Record]], samples: Mapping[str, Sequence[Sample]]
) -> dict[str, dict[str, float]]:
    """Means by task in percent: RULER's `string_match`, or our tasks' own `score`. What failed counts as 0."""
    scores: dict[str, list[float]] = {}
    for cell, own in records.items():
        for record, sample, _ in _asked(own, samples[cell.task]):
            scores.setdefault(_task_name(cell, sample), []).append(record.score)
    metric = "score" if setting.dataset == OWN else "string_match"
    return {task: {metric: round(100 * sum(own) / len(own), 2)} for task, own in sorted(scores.items())}
