"""Which kernels a build makes: from source those of this processor, for a wheel those of every one."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from millpond.kernels.native import library

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="there is one instruction set on this machine"),
]


def configured(folder: Path, isas: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", ROOT, "-B", folder, f"-DMILLPOND_ISAS={isas}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def targets(folder: Path) -> set[str]:
    command = ["cmake", "--build", folder, "--target", "help"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    words = {word.rstrip(":") for line in listed.stdout.splitlines() for word in line.split()}
    return {word.removeprefix("millpond_") for word in words if word.startswith("millpond_")} - {library.PROBE}


def test_a_build_from_source_makes_the_kernels_of_this_processor_alone(tmp_path: Path) -> None:
    done = configured(tmp_path, "native")
    assert done.returncode == 0, done.stderr
    assert len(targets(tmp_path)) == 1
    assert targets(tmp_path) <= set(library.X86)
    if library.runnable():
        assert targets(tmp_path) == {library.runnable()[0]}


def test_a_wheel_has_the_kernels_of_every_processor(tmp_path: Path) -> None:
    assert configured(tmp_path, "all").returncode == 0
    assert targets(tmp_path) == set(library.X86)


def test_another_word_is_refused(tmp_path: Path) -> None:
    done = configured(tmp_path, "some")
    assert done.returncode != 0
    assert "must be native or all" in done.stderr


def test_kernels_of_another_processor_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed", lambda: {"v4bf16": Path("millpond_v4bf16.so")})
    with pytest.warns(library.NativeKernelsWarning, match=r"built for another processor \(v4bf16\).*pip install"):
        library.warn_missing()
