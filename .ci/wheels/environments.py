"""Fresh environments on a search path without any compiler, where whatever would have to be built fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: Programs of the system that shells and scripts take for granted.
SYSTEM = ("sh", "bash", "env", "uname", "cat", "ls", "cp", "mv", "rm", "mkdir", "ln", "dirname", "basename", "readlink")
#: What builds: none of it may be found.
BUILDERS = ("cc", "gcc", "g++", "c++", "clang", "clang++", "cmake", "ninja", "make", "ld", "as", "rustc", "cargo")
#: Kept from our own surroundings: they would change what is tested.
NOT_PASSED_ON = ("PYTHON", "MILLPOND", "VIRTUAL_ENV", "CC", "CXX", "CFLAGS", "CXXFLAGS", "CMAKE", "MAKE", "TRITON")


class CheckError(Exception):
    """A wheel does not do what it must."""


class Environment:
    """An environment that sees nothing but what is installed into it, and what `sees` has.

    Args:
        folder: where it is made. sees: another environment, whose packages it has too; only what that one has in common
            with all is put there, so that it is downloaded once.
    """

    def __init__(self, folder: Path, sees: Environment | None = None) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
        self.python = folder / "env" / "bin" / "python"
        (self.packages,) = (folder / "env" / "lib").glob("python3*/site-packages")
        if sees is not None:
            (self.packages / "seen.pth").write_text(f"{sees.packages}\n", encoding="utf-8")
        self.work = folder / "work"
        for name in ("work", "home", "system"):
            (folder / name).mkdir()
        for name in SYSTEM:
            program = shutil.which(name)
            if program is not None:
                (folder / "system" / name).symlink_to(program)
        self.path = f"{self.python.parent}:{folder / 'system'}"
        reachable = [name for name in BUILDERS if shutil.which(name, path=self.path)]
        if reachable:
            raise CheckError(f"{', '.join(reachable)} can be reached on {self.path}; nothing that builds may be")

    def install(self, *requirements: str | Path, wheels: Path | None = None, sources: Sequence[str] = ()) -> None:
        """Install from wheels alone.

        Args:
            wheels: a folder of more wheels. sources: packages of pure Python that are published without a wheel.
        """
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--python",
            self.python,
        ]
        command += ["install", "-q", "--no-compile", "--only-binary", ":all:"]
        for name in sources:
            command += ["--no-binary", name]
        if wheels is not None:
            command += ["--find-links", wheels]
        done = subprocess.run(
            [*command, *requirements], env=self._variables(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CheckError(f"pip install {' '.join(map(str, requirements))}:\n{done.stdout}{done.stderr}")

    def run(self, command: Sequence[str | Path], **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder of its own: its first word is a program of the environment."""
        first = self.python.parent / command[0]
        more = {"HOME": str(self.folder / "home"), "HF_HUB_OFFLINE": "1", "COLUMNS": "400", **variables}
        return subprocess.run(
            [first, *command[1:]],
            cwd=self.work,
            env=self._variables() | more,
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )

    def succeed(self, command: Sequence[str | Path], **variables: str) -> str:
        """What a command prints.

        Raises:
            CheckError: it fails.
        """
        done = self.run(command, **variables)
        if done.returncode:
            shown = " ".join(map(str, command))
            raise CheckError(f"{shown} {variables or ''} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def _variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)}
        return kept | {"PATH": self.path}
