"""A run: the cells of a plan, examined one after another into a store."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import millpond
from millpond.errors import OptionError
from millpond.hf.calibration.load import needs_calibration
from millpond.hf.generation import UnusedCacheWarning
from millpond.hf.model_profile import ModelProfile
from millpond.hf.model_support import supported
from millpond.methods import METHODS
from millpond_lab.evals.candidates.candidate import Compressed
from millpond_lab.evals.decoding.batch import EncodedPrompt, PromptBatch, batches, encode
from millpond_lab.evals.decoding.prompt_recording import PromptRecordings
from millpond_lab.evals.decoding.record import Cell, Record, SummaryRow
from millpond_lab.evals.decoding.record import Protocol as Asking
from millpond_lab.evals.harness.calibration_check import Said, line, said_of
from millpond_lab.evals.harness.context_check import check_fit
from millpond_lab.evals.harness.evaluator import Evaluator
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.store import ResumeWarning, RunStore, TaskFacts
from millpond_lab.evals.harness.summary import markdown, summarise
from millpond_lab.evals.sample import Sample
from millpond_lab.evals.spec import Spec
from millpond_lab.evals.task import TASKS, Task

#: Called with the cell, samples done and samples in all.
Progress = Callable[[Cell, int, int], None]


class Examines(Protocol):
    """Turns a batch into records: our `Evaluator`, or a peer in another process."""

    def examine(self, batch: PromptBatch) -> list[Record]:
        """A record for every question of the batch, in the order of `Batch.names`."""
        ...


class Writes(Protocol):
    """Writes what is finished in another form too."""

    def write(self, store: RunStore, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Called after each cell, with the samples of every task of the store."""
        ...


def run(
    plan: EvalPlan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    note: dict[str, Any] | None = None,
    progress: Progress = lambda cell, done, total: None,
    examiner: Callable[[Cell], Examines] | None = None,
    writer: Writes | None = None,
) -> list[SummaryRow]:
    """Examine every cell of `plan` and write the records and the summary into `folder`, continuing where it was left.

    Args:
        note: what to write down about this start of the harness: command, machine.
        progress: is called after each batch.
        examiner: makes what examines a cell; None for the plan's own candidates on `model`.
        writer: writes finished cells of the folder, those of earlier runs included, in a form of its own.

    Returns:
        The rows of all finished cells in the folder, those of earlier runs included.

    Raises:
        OptionError: the folder holds another run, one with another calibration, or one of a method whose file has
            changed; or a task has no proper samples, or none that fits into the model's positions; where some do not, a
            `TooLongWarning` says so.
        DataError: a data file, the calibration, or the folder of an earlier run, cannot be read.
        UnsupportedModelError: the model, or a method on this model, cannot be run.
    """
    profile = supported(model)
    if examiner is None:
        for cell in plan.cells():
            _try_out(plan, cell, model, tokenizer)
    setting = {
        "model": plan.model,
        "dtype": plan.dtype,
        "weights": fingerprint(model),
        "samples": plan.samples,
        "seed": plan.seed,
    }
    store = RunStore.open(folder, setting, _calibration(plan), _code(plan))
    samples = {name: _draw(name, task, tokenizer, plan) for name, task in plan.built.items()}
    for name, protocol in dict.fromkeys((cell.task, cell.protocol) for cell in plan.cells()):
        prompts = _prompts(samples[name], tokenizer, plan.built[name], protocol)
        check_fit(name, protocol, prompts, profile.position_limit)
    facts = {name: _facts(plan.built[name], drawn) for name, drawn in samples.items()}
    if writer is not None:
        earlier = {name: Spec.parse(name).build(TASKS) for name in store.tasks if name not in samples}
        samples |= {name: _draw(name, task, tokenizer, plan) for name, task in earlier.items()}
        facts |= {name: _facts(task, samples[name]) for name, task in earlier.items()}
    store.begin(plan.cells(), facts, {**(note or {}), "batch_size": plan.batch_size, **versions()})
    rows: dict[Cell, SummaryRow] = {}
    for group in _groups(plan):
        name, protocol = group[0].task, group[0].protocol
        made = _batches(samples[name], tokenizer, plan.built[name], protocol, plan.batch_size)
        recordings = PromptRecordings(_reads_hidden(plan)) if len(group) > 1 else None
        together: Iterable[dict[Cell, Examines]]
        if examiner is None:
            together = [{cell: _examiner(plan, cell, model, tokenizer, recordings) for cell in group}]
        else:
            together = ({cell: examiner(cell)} for cell in group)
        for own in together:
            _examine(own, made, store, progress)
            _summarise(store, rows)
            if writer is not None:
                writer.write(store, samples)
    _tell_of_unfinished(store)
    return list(rows.values())


def _calibration(plan: EvalPlan) -> Said | None:
    """What to write down of the plan's calibration, where a codec in it needs one."""
    if plan.calibration is None or not any(needs_calibration(codec) for codec in plan.codecs):
        return None
    return said_of(plan.calibration)


def _code(plan: EvalPlan) -> dict[str, str]:
    """Digests of the files of methods from outside the package, by their names."""
    methods = {one.method for one in plan.candidates.values() if isinstance(one, Compressed)}
    builds = {name: METHODS.get(name).build for name in sorted(methods)}
    files = {name: inspect.getsourcefile(build) for name, build in builds.items() if not _is_ours(build.__module__)}
    return {name: _digest(Path(file).read_bytes()) for name, file in files.items() if file}


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("millpond", "millpond_lab")


def _try_out(plan: EvalPlan, cell: Cell, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse now what this model would refuse at the cell's first batch."""
    candidate = plan.candidates[cell.method]
    if isinstance(candidate, Compressed):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnusedCacheWarning)
            candidate.open(
                model, tokenizer, PromptBatch(cell.protocol, "generate", ()), cell.budget, cell.codec
            ).close()


def _groups(plan: EvalPlan) -> list[list[Cell]]:
    """The cells of a plan in their order; those that read the same prompts together."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in plan.cells():
        groups.setdefault((cell.task, cell.protocol), []).append(cell)
    return list(groups.values())


def _reads_hidden(plan: EvalPlan) -> bool:
    """Whether a method of a plan scores entries by what the attention modules read."""
    methods = (one for one in plan.candidates.values() if isinstance(one, Compressed))
    return any(METHODS.get(one.method)(**one.options).reads_hidden for one in methods)


def _examiner(
    plan: EvalPlan,
    cell: Cell,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recordings: PromptRecordings | None,
) -> Evaluator:
    return Evaluator(
        cell.key,
        model,
        tokenizer,
        plan.built[cell.task],
        plan.candidates[cell.method],
        cell.budget,
        cell.codec,
        limit=ModelProfile.of(model).position_limit,
        recordings=recordings,
    )


def _examine(
    examiners: Mapping[Cell, Examines], made: Sequence[PromptBatch], store: RunStore, progress: Progress
) -> None:
    """Answer what is not answered yet, in the same batches whatever was answered before; a batch in all cells at once.

    Each batch need then be read only once, and a run in two parts gives the numbers of one in one, to the last bit.
    """
    total = len({name for batch in made for name, _ in batch.names})
    seen: set[str] = set()
    for cell in examiners:
        progress(cell, 0, total)
    for batch in made:
        seen |= {name for name, _ in batch.names}
        for cell, examiner in examiners.items():
            if not store.has(cell.key, batch.names):
                store.add(examiner.examine(batch))
            progress(cell, len(seen), total)


def _batches(
    samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, task: Task, protocol: Asking, size: int
) -> list[PromptBatch]:
    prompts = _prompts(samples, tokenizer, task, protocol)
    return list(batches(prompts, task.kind, protocol, size))


def _prompts(
    samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, task: Task, protocol: Asking
) -> list[EncodedPrompt]:
    return [prompt for sample in samples for prompt in encode(sample, tokenizer, task.kind, protocol)]


def _summarise(store: RunStore, rows: dict[Cell, SummaryRow]) -> None:
    """Bring `rows`, which stay in the order of the store's cells, and the folder's summary up to date."""
    fresh = {c: rows.get(c) or summarise(c, store.of(c), store.tasks[c.task].kind) for c in store.finished()}
    rows.clear()
    rows.update(fresh)
    store.write_summary(list(rows.values()), markdown(list(rows.values()), line(store.calibration)))


def _tell_of_unfinished(store: RunStore) -> None:
    left = len(store.cells) - len(store.finished())
    if left:
        warnings.warn(
            f"{left} combinations of an earlier run in {store.folder} are not finished and not in the summary; name "
            "them again to finish them",
            ResumeWarning,
            stacklevel=3,
        )


def _draw(name: str, task: Task, tokenizer: PreTrainedTokenizerBase, plan: EvalPlan) -> list[Sample]:
    samples = list(task.samples(tokenizer, plan.samples, plan.seed))
    if not samples:
        raise OptionError(f"task {name!r} has no sample; give it data, or other options")
    if len({sample.id for sample in samples}) < len(samples):
        raise OptionError(f"task {name!r} gives two samples the same id, so their records could not be distinguished")
    for sample in samples:
        if not sample.questions:
            raise OptionError(f"task {name!r}: sample {sample.id!r} asks nothing")
    return samples


def _facts(task: Task, samples: Sequence[Sample]) -> TaskFacts:
    text = json.dumps([_told(sample) for sample in samples], sort_keys=True, default=str)
    questions = sum(len(sample.questions) for sample in samples)
    return TaskFacts(task.kind, len(samples), questions, _digest(text.encode()))


def _told(sample: Sample) -> dict[str, Any]:
    """A sample as data; what it may have only where it has it, so that runs from before there was any continue."""
    whole = asdict(sample)
    if not sample.written:
        del whole["written"]
    for part in (whole, *whole["questions"]):
        if part["tokens"] is None:
            del part["tokens"]
    return whole


def fingerprint(model: PreTrainedModel) -> str:
    """Tells models of one name apart: a digest of the first numbers of every weight."""
    parts = [
        f"{name} {tuple(weight.shape)} {weight.dtype} {weight.detach().flatten()[:16].float().tolist()}"
        for name, weight in model.named_parameters()
    ]
    return _digest("\n".join(parts).encode())


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {
        "millpond": millpond.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
