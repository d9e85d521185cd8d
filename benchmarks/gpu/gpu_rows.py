"""Cells of the GPU benchmarks, the file with a row for each that has run, and the clock that ends a run in time."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Any

from gpu_goals import goal_text

Row = dict[str, Any]

#: Seconds after its end in which a run may still write its last row, before the process is ended.
GRACE = 20
#: How often a measured cell may take as long as was thought before it ran; a cell takes it into account.
MARGIN = 1.2


class CellTimeout(Exception):
    """A cell was still running when the time of the run was over."""


@dataclass(frozen=True)
class Cell:
    """One measurement: what makes a row.

    Attributes:
        section, name: which one; together they name the row.
        run: measures and returns the figures of the row.
        seconds: how long it takes, about; corrected by the cells of its section that have run.
    """

    section: str
    name: str
    run: Callable[[], Mapping[str, Any]]
    seconds: float


class RowFile:
    """A file of JSON lines, a row for each cell; several processes may append to it.

    A line that says where the rows behind it were measured stands before them, once; see `read_rows`.

    Args:
        path: of the file; its folder is made.
        machine: what every row says of where it was measured, the card among it.
    """

    def __init__(self, path: Path, machine: Row) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._machine = path, machine
        lines = [] if not path.exists() else path.read_text(encoding="utf-8").splitlines()
        machines = [line for line in lines if line.startswith(_MACHINE)]
        if not machines or json.loads(machines[-1])["machine"] != machine:
            self._write({"machine": machine})
        self._done = {
            (row["section"], row["cell"])
            for row in read_rows(path)
            if row.get("card") == machine["card"] and not {"error", "skipped"} & set(row) and row.get("ok") is not False
        }

    def has(self, cell: Cell) -> bool:
        """Whether the file has figures of this cell on this card, and no mismatch."""
        return (cell.section, cell.name) in self._done

    def append(self, cell: Cell, figures: Mapping[str, Any], seconds: float) -> Row:
        """Write the row of a cell, at once; its goals stand beside its figures."""
        goal = goal_text(cell.section, cell.name)
        row = {"section": cell.section, "cell": cell.name, "seconds": round(seconds, 2), **figures}
        row |= {"goal": goal} if goal else {}
        self._write(row)
        return {**self._machine, **row}

    def _write(self, found: Row) -> None:
        line = (json.dumps(found, separators=(",", ":")) + "\n").encode()
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, line)  # one call, so that lines of two processes do not mix
        finally:
            os.close(handle)


#: Begins a line that says where the rows behind it were measured.
_MACHINE = '{"machine":'


def read_rows(path: Path) -> list[Row]:
    """All rows of a file, in the order in which they were written, each with its machine; [] where there is none.

    A row says where it was measured, or the last line before it that says so for all behind it.
    """
    rows, machine = list[Row](), Row()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line.startswith(_MACHINE):
            machine = json.loads(line)["machine"]
        elif line.strip():
            rows.append({**machine, **json.loads(line)})
    return rows


class RunClock:
    """The time that a run has.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the end; negative behind it."""
        return self._end - time.monotonic()

    @contextmanager
    def limiting(self) -> Iterator[None]:
        """What runs inside gets a CellTimeout at the end; if it does not heed it, the process ends soon after.

        Only in the main thread, as signals are.
        """

        def end(signum: int, frame: FrameType | None) -> None:
            raise CellTimeout("the time of the run was over")

        left = max(self.left(), 0.1)
        before = signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, left)
        last = Timer(left + GRACE, os._exit, (124,))
        last.daemon = True
        last.start()
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            last.cancel()


class CellRunner:
    """Runs cells one after another while there is time for them.

    Args:
        rows: where their rows go, and whose cells are not run again.
        tell: called with a line of text for each cell.
        texts: a cell is run if its section and name hold one of them.

    Attributes:
        failed: cells that raised something, or whose row says that it is not ok. left_out: those without time.
        ran: the rows of all that were run.
    """

    def __init__(
        self, rows: RowFile, clock: RunClock, tell: Callable[[str], None] = print, texts: Sequence[str] = ("",)
    ) -> None:
        self._rows, self._clock, self._tell, self._texts = rows, clock, tell, texts
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self.ran: list[Row] = []

    def run(self, cells: Sequence[Cell]) -> None:
        """Run the cells that have no row yet, section by section; an error is a row, and the next cell runs."""
        chosen = [cell for cell in cells if any(text in f"{cell.section} {cell.name}" for text in self._texts)]
        for section, group in itertools.groupby(chosen, key=lambda cell: cell.section):
            same = list(group)
            missing = [cell for cell in same if not self._rows.has(cell)]
            guess = sum(cell.seconds for cell in missing)
            self._tell(
                f"== {section}: {len(missing)} of {len(same)} cells, about {guess:.0f} s of {self._clock.left():.0f} s"
            )
            factor = 1.0
            for cell in missing:
                if cell.seconds * factor > self._clock.left():
                    self.left_out.append(f"{cell.section} {cell.name}")
                    self._tell(f"{cell.section} {cell.name}: left out, no time for about {cell.seconds * factor:.0f} s")
                    continue
                took = self._run(cell)
                factor = MARGIN * took / cell.seconds if took > cell.seconds else 1.0

    def _run(self, cell: Cell) -> float:
        begin = time.perf_counter()
        figures: Mapping[str, Any]
        try:
            with self._clock.limiting():
                figures = cell.run()
        except Exception as error:  # what a cell cannot do is a result
            figures = {"error": f"{type(error).__name__}: {error}"[:500], "where": traceback.format_exc()[-900:]}
        took = time.perf_counter() - begin
        row = self._rows.append(cell, figures, took)
        self.ran.append(row)
        if "error" in row or row.get("ok") is False:
            self.failed.append(f"{cell.section} {cell.name}")
        self._tell(f"{cell.section} {cell.name}: {shown(figures)} ({took:.1f} s)")
        return took


def shown(figures: Mapping[str, Any]) -> str:
    """Figures on one line; what is long is left out."""
    short = {
        name: f"{value:.4g}" if isinstance(value, float) else value
        for name, value in figures.items()
        if name != "where" and not isinstance(value, list | dict)
    }
    return ", ".join(f"{name} {value}" for name, value in short.items())
