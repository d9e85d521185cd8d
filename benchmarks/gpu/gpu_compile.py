"""Compile the Triton kernels for a CUDA GPU on a machine that has none.

    PYTHONPATH=src python benchmarks/gpu/gpu_compile.py [--tiny]

The calls are those of gpu_check.py, with all its shapes, formats and rules; nothing is launched, so no number is
computed. It shows what the interpreter of Triton cannot: that each variant passes Triton's compiler and NVIDIA's
assembler, and how much shared memory, how many registers and how much spilled memory it takes. The exit status is 1
where one needs more shared memory than a thread block may have. --tiny takes few shapes, in a minute.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gpu_codes
import gpu_ops
import gpu_plan_ops
import torch
import triton
from gpu_machine import Machine
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 232_448  #: bytes that a thread block may have on Hopper
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
Row = dict[str, Any]
#: Modules that would refuse tensors on the CPU.
CHECKED = (
    *("admit", "decode", "dense", "few_rows", "pages", "prefill", "selection", "transform", "window"),
    "write_packed",
)


class Absent:
    """The driver of a GPU that is not there, as far as compiling asks it."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Compiled(NamedTuple):
    """What one variant of a kernel takes; bytes but for the registers of a thread."""

    name: str
    shared: int
    registers: int
    spilled: int


def compile_instead_of_launch() -> dict[str, Compiled]:
    """From now on a launch compiles; returns where what was compiled is gathered, by hash."""
    found: dict[str, Compiled] = {}
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in found:
            found[kernel.hash] = Compiled(self.fn.__name__, kernel.metadata.shared, *resources(kernel.asm["cubin"]))
        return kernel

    JITFunction.run = run
    driver.set_active(Absent())
    for module in CHECKED:
        importlib.import_module(f"millpond.kernels.gpu.{module}").check = lambda *given: None  # type: ignore[attr-defined]
    return found


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills, as the assembler says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (max(map(int, re.findall(rf"{what}:(\d+)", said)), default=0) for what in ("REG", "STACK"))
    return registers, stack


def compile_all(tiny: bool) -> dict[str, Compiled]:
    """Every kernel in every variant that gpu_check.py calls for."""
    found = compile_instead_of_launch()
    # nothing is computed, so there is nothing to compare with
    gpu_ops.reference = gpu_plan_ops.reference = gpu_ops.gpu  # type: ignore[assignment]
    seal = gpu_codes.reference.write_packed
    gpu_codes.reference = SimpleNamespace(decode=gpu_codes.gpu.decode, write_packed=seal)  # type: ignore[assignment]
    machine = Machine(interpret=True, tiny=tiny)
    calls = itertools.chain(
        *(check(machine) for check in gpu_ops.CHECKS),
        *(gpu_codes.checked(machine, codec) for codec in gpu_codes.CODECS),
        *(gpu_codes.encoded(machine, codec) for codec in gpu_codes.CODECS),
    )
    for _ in track(calls, description="compiling", console=Console(stderr=True)):
        pass
    return found


def show(found: dict[str, Compiled]) -> int:
    """Print a row per kernel; returns how many variants ask for too much shared memory."""
    table = Table("kernel", "variants", "shared KiB", "registers", "spilled bytes", title=f"sm_{HOPPER.arch}, at most")
    for name in sorted({kernel.name for kernel in found.values()}):
        same = [kernel for kernel in found.values() if kernel.name == name]
        most = [max(getattr(kernel, what) for kernel in same) for what in ("shared", "registers", "spilled")]
        table.add_row(name, str(len(same)), f"{most[0] / 1024:.1f}", str(most[1]), str(most[2]))
    Console().print(table)
    return sum(kernel.shared > SHARED_LIMIT for kernel in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few shapes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    too_large = show(compile_all(arguments.tiny))
    if too_large:
        sys.exit(f"{too_large} variants need more than {SHARED_LIMIT:,} bytes of shared memory")


if __name__ == "__main__":
    main()
