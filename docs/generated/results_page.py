"""The table of all committed results: what was measured, when, on which machine, and which page shows it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from generated.markup import NOTE, cell, left
from generated.results import RESULTS, ROOT
from millpond_lab.bench.common.report import markdown_table

#: Day of the commit that wrote each result; `benchmarks/results_dates.py` adds those of new ones.
DATES = RESULTS / "dates.json"
#: What is no result.
_OTHERS = {"README.md", "dates.json"}
INTRODUCTION = """\
# Results

Every committed result, the newest first: its day, the machine that it was timed on, its command, and the pages that
show it. Where no machine is named, nothing was timed, or the rows name it one by one. Ratios hold within a file; two
files were measured on different days, and often on different hosts.
"""


def entries(folder: Path = RESULTS) -> dict[str, list[Path]]:
    """Files and folders of results by their name without endings."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.name not in _OTHERS:
            found.setdefault(path.name.partition(".")[0], []).append(path)
    return found


def results_page(written: Mapping[Path, str]) -> str:
    """The page `benchmarks/results/README.md`; `written` are the texts of other generated pages."""
    dates: dict[str, str] = json.loads(DATES.read_text(encoding="utf-8"))
    pages = {
        path: written.get(path) or path.read_text(encoding="utf-8")
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    }
    found = entries()
    if lost := sorted(found.keys() ^ dates.keys()):
        raise SystemExit(
            f"results without a day, or days without a result: {', '.join(lost)}; run benchmarks/results_dates.py"
        )
    lines = [_line(name, found[name], dates[name], pages) for name in sorted(found)]
    lines.sort(key=lambda line: line[0], reverse=True)
    table = markdown_table(("day", "result", "machine", "command", "shown on"), lines)
    return f"{NOTE}{INTRODUCTION}\n{left(table)}"


def _line(name: str, paths: list[Path], day: str, pages: dict[Path, str]) -> tuple[str, ...]:
    shown = next((path for path in paths if path.suffix == ".md"), paths[0])
    report = _report(paths)
    machine = report.get("hardware") or _cpu(report.get("machine"))
    ends = tuple(f"results/{path.name}" for path in paths)
    links = [
        f"[{page.stem}](../../{page.relative_to(ROOT)})"
        for page, text in pages.items()
        if any(f"{end}{more}" in text for end in ends for more in (")", "/", "`"))
    ]
    command = str(report.get("command", "")).partition(" --")[0]
    return day, f"[{name}]({shown.name})", str(machine or ""), cell(f"`{command}`" if command else ""), ", ".join(links)


def _report(paths: Iterable[Path]) -> dict[str, Any]:
    """The JSON of a result, if it is an object."""
    for path in paths:
        file = next(iter(sorted(path.glob("*.json"))), None) if path.is_dir() else path
        if file is not None and file.suffix == ".json":
            report = json.loads(file.read_text(encoding="utf-8"))
            return report if isinstance(report, dict) else {}
    return {}


def _cpu(machine: Any) -> str:
    return str(machine.get("cpu", "")) if isinstance(machine, dict) else ""
