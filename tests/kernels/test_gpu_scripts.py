"""The scripts for a GPU on a machine that has none: every Triton kernel compiles for it, and equals the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install 'millpond[gpu]')")

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"


def run(script: str, *options: str) -> str:
    """What a script prints, in a process of its own: here Triton may be in its interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPTS / script, *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu() -> None:
    shown = run("gpu_compile.py", "--tiny")
    kernels = ("attend", "attend_packed", "combine", "score", "settle", "forward", "column_sums", "_write")
    kernels = (*kernels, "window_parts", "window_shares", "select", "share", "move", "_read_scores")
    kernels = (*kernels, "encode", "_project", "_encode", "let_go")
    for kernel in (*kernels, "normalize_rows", "rotate_heads", "gate_rows", "multiply_few", "join_parts"):
        assert f" {kernel} " in shown


@pytest.mark.slow
def test_the_checks_pass_in_the_interpreter(tmp_path: Path) -> None:
    sections = "check,graph,codes"
    options = ("--interpret", "--tiny", "--only", sections)
    assert "all checks passed" in run("gpu_check.py", *options, "--out", str(tmp_path))


@pytest.mark.slow
def test_heads_are_trained_on_a_cpu() -> None:
    assert "'steps': 2" in run("gpu_train.py", "--tiny", "--steps", "2")
