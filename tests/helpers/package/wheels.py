"""Building this checkout, and environments that see a chosen set of the libraries that are installed here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
#: Calls a hook of the build backend: its name, the folder for what it makes, settings.
HOOK = """
import json, sys
from scikit_build_core import build
print(getattr(build, sys.argv[1])(sys.argv[2], json.loads(sys.argv[3])))
"""


def pip(*arguments: str | Path) -> str:
    """Run pip; the test is skipped where it cannot fetch what builds the package."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if re.search(r"No matching distribution|Could not find a version|Connection|Network is unreachable", done.stderr):
        pytest.skip("scikit-build-core cannot be fetched: the wheel is built where a package registry answers")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def checkout(to: Path) -> Path:
    """A copy of the files that belong to the repository: nothing that was built here."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a checkout of the repository")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
    return to


class Backend:
    """scikit-build-core in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        requires = re.search(r'requires = \["(scikit-build-core[^"]*)"\]', (ROOT / "pyproject.toml").read_text())
        assert requires is not None
        pip("install", "--quiet", "--target", folder, requires[1])

    def build(self, hook: str, source: Path, to: Path, **settings: str) -> Path:
        """What `build_sdist` or `build_wheel` makes of a source tree."""
        command = [sys.executable, "-c", HOOK, hook, str(to), json.dumps(settings)]
        environment = {"PYTHONPATH": str(self.folder), "PATH": "/usr/local/bin:/usr/bin:/bin"}
        done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return to / done.stdout.splitlines()[-1]


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, but the list of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def needed(requirements: Iterable[str], extra: str = "") -> Iterator[str]:
    """The libraries that requirements name, and those that they need in turn, as far as these are installed here.

    Raises:
        PackageNotFoundError: one that is named is not installed here.
    """
    waiting, seen = [(text, extra, True) for text in requirements], set[tuple[str, str]]()
    while waiting:
        text, wanted, is_direct = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": wanted}):
            continue
        for option in ("", *requirement.extras):
            if (requirement.name, option) in seen:
                continue
            seen.add((requirement.name, option))
            if requirement.name == "millpond":  # an extra of its own that another one names
                waiting += [(other, option, True) for other in requirements]
                continue
            try:
                found = distribution(requirement.name)
            except PackageNotFoundError:
                if is_direct:
                    raise
                continue  # such as a GPU's: this installation runs without it
            yield requirement.name
            waiting += [(other, option, False) for other in found.requires or ()]


def environment(to: Path, wheel: Path, requirements: list[str], extra: str = "") -> Path:
    """The Python of a new environment: the wheel, what it requires as it is installed here, and nothing else."""
    try:
        names = set(needed(requirements, extra))
    except PackageNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed here; it belongs to millpond[{extra}]")
    seen = to / "libraries"
    seen.mkdir(parents=True)
    for name in names:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not top.endswith(".pth") and not (seen / top).exists():
                (seen / top).symlink_to(Path(str(found.locate_file(top))).resolve())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", to / "venv"], check=True)
    python = to / "venv" / "bin" / "python"
    site = next((to / "venv" / "lib").glob("python*/site-packages"))
    (site / "libraries.pth").write_text(f"{seen}\n", encoding="utf-8")
    pip("--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    return python
