"""The kernels without Python and torch: a program in C++ calls each of them and compares with loops in double.

So a library is checked for hardware on which torch does not run here: the aarch64 one, cross-compiled, in an emulator.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from millpond.kernels.native import library

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "millpond" / "kernels" / "native" / "csrc"
PROGRAM = Path(__file__).parent / "native"
CROSS = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
HOST = next((c for c in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if c and shutil.which(c)), None)


def build(compiler: str, to: Path) -> Path:
    """The check program; products and sums are not contracted, so that it means what it says."""
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
    subprocess.run([compiler, *flags, str(PROGRAM / "check.cpp"), "-o", str(to), "-ldl"], check=True)
    return to


def assert_right(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules of heads" in done.stdout  # the last of all families


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if HOST is None:
        pytest.skip("no C++ compiler builds the check program; install g++ or clang")
    return build(HOST, tmp_path_factory.mktemp("native") / "check")


@pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
@pytest.mark.parametrize("isa", library.runnable() or ["none"])
def test_each_library_of_this_host_equals_loops_in_double(program: Path, isa: str) -> None:
    assert_right(program, library.installed()[isa])


@pytest.mark.slow
def test_the_aarch64_kernels_compile_and_equal_loops_in_double(tmp_path: Path) -> None:
    missing = [tool for tool in (CROSS, EMULATOR, "cmake") if not shutil.which(tool)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt install g++-aarch64-linux-gnu qemu-user cmake")
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={PROGRAM / 'aarch64.cmake'}"
    subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, toolchain], check=True)
    subprocess.run(["cmake", "--build", tmp_path, "-j2"], check=True)
    assert [file.name for file in tmp_path.glob("millpond_*.so")] == ["millpond_neon.so"]
    program = build(CROSS, tmp_path / "check")
    assert_right(EMULATOR, "-L", "/usr/aarch64-linux-gnu", program, tmp_path / "millpond_neon.so")
