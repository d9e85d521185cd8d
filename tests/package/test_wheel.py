"""The wheel: built from the source archive, installed into an empty environment, and used alone and with each extra."""

from __future__ import annotations

import email
import os
import re
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.package.wheels import ROOT, Backend, checkout, contents, environment, needed, pip

pytestmark = pytest.mark.slow

#: What each extra is for, in the shortest program that needs it.
WITH_EXTRA = {
    "cli": "from millpond.cli import app",
    "plot": "import millpond.cli.demo.picture",
    "server": "from millpond.server.app import create_app",
    "constrained": (
        "import millpond as mp\n"
        "params = mp.SamplingParams(max_tokens=8, temperature=0, choice=('kettle', 'ladder'))\n"
        "with mp.LLM('pond-recall') as llm:\n"
        "    assert llm.generate('anna', params)[0].completions[0].text.strip() in ('kettle', 'ladder')\n"
    ),
}


class Built(NamedTuple):
    wheel: Path
    source: Path
    files: dict[str, bytes]
    metadata: email.message.Message

    @property
    def requirements(self) -> list[str]:
        return self.metadata.get_all("Requires-Dist") or []


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    return Backend(tmp_path_factory.mktemp("backend"))


@pytest.fixture(scope="module")
def built(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel of the source archive of this checkout. MILLPOND_WHEEL names one that is built already."""
    folder = tmp_path_factory.mktemp("built")
    source = backend.build("build_sdist", checkout(folder / "checkout"), folder)
    if "MILLPOND_WHEEL" in os.environ:
        wheel = Path(os.environ["MILLPOND_WHEEL"])
    else:
        pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "wheel", source)
        (wheel,) = (folder / "wheel").iterdir()
    files = contents(wheel)
    (metadata,) = (text for name, text in files.items() if name.endswith(".dist-info/METADATA"))
    return Built(wheel, source, files, email.message_from_string(metadata.decode()))


@pytest.fixture(scope="module")
def python_of(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Python of an environment with an extra, "" for none: made once."""
    return cache(lambda extra: environment(tmp_path_factory.mktemp("env"), built.wheel, built.requirements, extra))


def run(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Away from the checkout, and with none of its variables."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(python.parent), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(python), *map(str, arguments)]
    return subprocess.run(command, cwd=python.parent, env=clean, capture_output=True, text=True, check=False)


def test_it_holds_the_package_with_kernels_and_nothing_else(built: Built) -> None:
    assert re.fullmatch(r"millpond-\d+\.\d+\.\d+-py3-none-\w+\.whl", built.wheel.name)
    names = set(built.files)
    assert {"millpond/__init__.py", "millpond/py.typed"} <= names
    assert sum(bool(re.fullmatch(r"millpond/kernels/native/millpond_\w+\.so", name)) for name in names) >= 1
    assert {name.split("/")[0].split("-")[0] for name in names} == {"millpond"}
    assert not {name for name in names if name.startswith(("millpond/evals", "millpond/bench", "millpond/train"))}
    unwanted = [n for n in names if re.search(r"csrc/|CMakeLists|\.(cpp|hpp)$|__pycache__|(^|/)tests?/", n)]
    assert not unwanted
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_its_long_description_is_the_readme(built: Built) -> None:
    assert built.metadata["Description-Content-Type"] == "text/markdown"
    assert built.metadata["Summary"]
    assert str(built.metadata.get_payload()).strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_source_archive_and_checkout_make_the_same_wheel(built: Built, backend: Backend, tmp_path: Path) -> None:
    settings = {"wheel.cmake": "false"}  # the kernels take minutes
    made = contents(backend.build("build_wheel", checkout(tmp_path / "checkout"), tmp_path, **settings))
    shared = {name: text for name, text in built.files.items() if not name.endswith((".so", "/WHEEL"))}
    assert shared == {name: text for name, text in made.items() if not name.endswith("/WHEEL")}


def test_the_source_archive_is_small_and_can_be_tested(built: Built) -> None:
    assert built.source.stat().st_size <= 8_800_000
    with tarfile.open(built.source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "CMakeLists.txt", "Makefile", "README.md", "LICENSE", "tests/conftest.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_library_alone_needs_four_libraries(built: Built, python_of: Callable[[str], Path]) -> None:
    direct = {name for name in built.requirements if "extra ==" not in name}
    assert {re.split(r"[<>=~!; ]", name)[0] for name in direct} == {"torch", "transformers", "safetensors", "numpy"}
    done = run(python_of(""), ROOT / "tests" / "package" / "installed.py")
    assert done.returncode == 0, done.stderr
    assert "runs with the kernels for" in done.stdout


@pytest.mark.parametrize("extra", WITH_EXTRA)
def test_an_extra_brings_what_its_part_needs(built: Built, python_of: Callable[[str], Path], extra: str) -> None:
    python = python_of(extra)
    if set(needed(built.requirements, extra)) - set(needed(built.requirements)):  # transformers brings some of them
        assert run(python_of(""), "-c", WITH_EXTRA[extra]).returncode != 0
    done = run(python, "-c", WITH_EXTRA[extra])
    assert done.returncode == 0, done.stderr


def test_the_command_runs(built: Built, python_of: Callable[[str], Path]) -> None:
    command = python_of("cli").parent / "millpond"
    version = re.search(r"-(\d[^-]*)-", built.wheel.name)
    assert version is not None
    assert run(command, "--version").stdout == f"millpond {version[1]}\n"
    text = "anna kettle " + "quiet rain " * 40 + "<ask> anna <is>"
    done = run(command, "generate", "--prompt", text, "--method", "h2o", "--budget", "50%", "--max-new-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert "kettle" in done.stdout


def test_the_server_serves(python_of: Callable[[str], Path], tmp_path: Path) -> None:
    python = python_of("server")
    command = [python.parent / "millpond", "serve", "--port", "0", "--model", "pond-recall", "--kv-memory", "16MiB"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={"OMP_NUM_THREADS": "1"}
    ) as server:
        try:
            found = next(filter(None, (re.search(r"http://[\w.]+:\d+", line) for line in server.stdout or ())), None)
            assert found is not None
            with urllib.request.urlopen(f"{found[0]}/health", timeout=30) as answer:
                assert answer.status == 200
            with urllib.request.urlopen(f"{found[0]}/", timeout=30) as answer:
                assert b"<html" in answer.read()  # the page's files are in the wheel
        finally:
            server.terminate()
