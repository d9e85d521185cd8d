"""All pictures of a folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from millpond.errors import DataError, unknown
from millpond.inspector.trace import read_trace
from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.harness.store import SUMMARY
from millpond_lab.evals.harness.summary import cell_of, read_rows, read_samples
from millpond_lab.evals.report.plots.budgets import budget_map, budgets_of_trace
from millpond_lab.evals.report.plots.needle import needle, panels_of
from millpond_lab.evals.report.plots.pareto import pareto
from millpond_lab.evals.report.plots.quality import quality
from millpond_lab.evals.report.plots.style import write

TRACES = "*.trace.json"


def draw_all(folder: Path, out: Path, suffix: str = "png", methods: Sequence[str] | None = None) -> list[Path]:
    """Draw what `folder` has numbers for into `out`; returns the files.

    Args:
        folder: of results. out: of the pictures. suffix: png, svg or pdf.
        methods: those to draw, as their rows name them (`h2o`, `h2o:sinks=0`); None: all.

    Raises:
        DataError: there is nothing to draw, or a file cannot be read.
        OptionError: the results know no method of that name.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; name one that millpond eval wrote")
    found = [*_of_run(folder, methods), *_of_traces(folder)]
    if not found:
        raise DataError(
            f"{folder} holds neither a {SUMMARY} with scores nor a {TRACES}; millpond eval --out {folder} or millpond "
            "inspect --trace writes one"
        )
    return [write(made, out / f"{name}.{suffix}") for name, made in found]


def _of_run(folder: Path, methods: Sequence[str] | None) -> Iterator[tuple[str, Figure]]:
    if not (folder / SUMMARY).exists():
        return
    rows = _chosen(read_rows(folder), methods)
    scored = [row for row in rows if row.score == row.score and row.kv_bytes > 0]
    for setting in dict.fromkeys((row.model, row.protocol, row.seed) for row in scored):
        own = [row for row in scored if (row.model, row.protocol, row.seed) == setting]
        codecs = {(row.task, row.codec) for row in own}
        crossed = {row.task for row in own if sum(task == row.task for task, _ in codecs) > 1}
        for kind, draw, chosen in (("quality", quality, False), ("pareto", pareto, True)):
            rows_of_kind = [row for row in own if (row.task in crossed) is chosen]
            if rows_of_kind:
                yield _name(kind, *map(str, setting)), draw(rows_of_kind)
    cells = [cell_of(row) for row in rows]
    for (model, task, protocol), panels in panels_of(cells, read_samples(folder)).items():
        yield _name("needle", model, task, protocol), needle(panels, f"{model}: {task} ({protocol})")


def _chosen(rows: list[SummaryRow], methods: Sequence[str] | None) -> list[SummaryRow]:
    if methods is None:
        return rows
    for name in methods:
        if all(row.method != name for row in rows):
            raise unknown("method", name, {row.method for row in rows})
    return [row for row in rows if row.method in methods]


def _of_traces(folder: Path) -> Iterator[tuple[str, Figure]]:
    for path in sorted(folder.glob(TRACES)):
        trace = read_trace(path)
        stem = path.name.removesuffix(TRACES[1:])
        what = " ".join(trace.setting.get(name, "") for name in ("method", "budget")).strip()
        made = budget_map(budgets_of_trace(trace), f"Budget per head: {what or stem}", trace.n_prompt)
        yield _name("budgets", stem), made


def _name(*parts: str) -> str:
    """A file name without what a file system may not like."""
    return "-".join(re.sub(r"[^\w.%+]+", "_", part).strip("_") for part in parts)
