"""Every Triton kernel passes the compiler and the assembler for a GPU, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install 'millpond[gpu]')")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_compile.py"


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu() -> None:
    """In a process of its own: here Triton may be in its interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, SCRIPT, "--tiny"], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for kernel in ("attend", "attend_packed", "combine", "score", "settle", "forward", "column_sums", "_write"):
        assert f" {kernel} " in run.stdout
