"""Cells of llama.cpp, whose weights are mapped from a file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from millpond.errors import OptionError
from millpond_lab.bench.engines.candidates import SCRIPTS
from millpond_lab.bench.offload.settings import OffloadSettings
from millpond_lab.bench.offload.shapes import prompts_of

#: Folder of its files, in the folder of the model.
FILES = "llamacpp"


def check(python: Path) -> None:
    """
    Raises:
        OptionError: there is no such environment.
    """
    if not python.is_file():
        raise OptionError(
            f"{python} is no Python of an environment with llama.cpp: run benchmarks/engines/llamacpp_env.sh, or "
            "choose other --cells"
        )


def _prepare(folder: Path, weights: str, settings: OffloadSettings, python: Path) -> None:
    """Write the file of its weights, unless it is there."""
    (folder / FILES).mkdir(exist_ok=True)
    file = _file(folder, weights)
    if not file.exists():
        _ask(python, {"make": True, "folder": str(folder), "file": str(file), "threads": settings.threads})


def run_llamacpp(folder: Path, weights: str, batch: int, settings: OffloadSettings, python: Path) -> dict[str, Any]:
    """One batch: each prompt, then a few steps of all; the rest is projected with their median.

    Args:
        weights: of `LLAMACPP`. python: of its environment.
    """
    _prepare(folder, weights, settings, python)
    found = _ask(
        python,
        {
            "make": False,
            "file": str(_file(folder, weights)),
            "cap": str(Path(__file__).with_name("cap.py")),
            "memory": settings.memory,
            "threads": settings.threads,
            "new": settings.new,
            "steps": settings.steps,
            "prompts": prompts_of(batch, settings.prompt, settings.shape),
        },
    )
    seconds = found["prefill_s"] + (settings.new - 1) * found["decode_step_s"]
    new_tokens = batch * settings.new
    return {
        "requests": batch,
        "new_tokens": new_tokens,
        "seconds": seconds,
        "projected": True,
        "tokens_per_s": new_tokens / seconds,
        **found,
    }


def _file(folder: Path, weights: str) -> Path:
    return folder / FILES / f"{weights}.gguf"


def _ask(python: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What the script says.

    Raises:
        RuntimeError: it failed.
    """
    command = [str(python), str(SCRIPTS / "llamacpp_capped.py"), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
