"""Trials: each setting in a process of its own, and rows that are there already are not run again."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond import MillpondError
from millpond_vllm import compat
from millpond_vllm.trial.rows import TrialRow, add_row, read_rows
from millpond_vllm.trial.setting import TrialSetting

_SHOWN = 12


class TrialError(MillpondError):
    """The process of a setting failed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The traffic, and what the engines of all settings have in common.

    Attributes:
        log: File of the traffic.
        given: Arguments of `vllm serve`, with the model.
        arguments: Returns the arguments of `vllm serve` for the settings of an engine; None for vLLM alone.
        out: File of the rows; None for none.
    """

    log: Path
    given: list[str]
    arguments: Callable[[dict[str, Any] | None], list[str]]
    out: Path | None = None

    @property
    def load(self) -> str:
        """Hash of the traffic, the arguments and the version of vLLM: rows of one hash can be compared."""
        parts = [self.log.read_bytes(), json.dumps(self.given).encode(), compat.vllm_version().encode()]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]

    def run(self, settings: Sequence[TrialSetting], begin: Callable[[str], None]) -> list[TrialRow]:
        """Return the rows of vLLM alone and of the settings, in this order.

        Args:
            settings: Settings besides vLLM alone.
            begin: Called with the name of each setting that is run.

        Raises:
            TrialError: a process failed; the rows before it are in the file.
            DataError: the file of the rows cannot be read.
        """
        load = self.load
        known = {row.setting: row for row in (read_rows(self.out, load) if self.out else ())}
        rows = []
        for setting in (TrialSetting(), *settings):
            row = known.get(str(setting))
            if row is None:
                begin(str(setting))
                row = known[str(setting)] = self._row(setting, load)
                if self.out:
                    add_row(self.out, row)
            rows.append(row)
        return rows

    def _row(self, setting: TrialSetting, load: str) -> TrialRow:
        """Run the process of a setting, and return its row."""
        arguments = self.arguments(None if setting.method is None else setting.engine())
        job = {"log": str(self.log), "arguments": arguments, "setting": str(setting), "load": load}
        with tempfile.TemporaryDirectory(prefix="millpond-vllm-trial-") as folder:
            given, made = Path(folder, "job.json"), Path(folder, "row.json")
            given.write_text(json.dumps(job), encoding="utf-8")
            command = [sys.executable, "-m", "millpond_vllm.trial.child", str(given), str(made)]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if done.returncode or not made.exists():
                last = "\n".join(done.stdout.splitlines()[-_SHOWN:])
                raise TrialError(f"setting {setting} failed with exit code {done.returncode}; it said last:\n{last}")
            return TrialRow(**json.loads(made.read_text(encoding="utf-8")))
