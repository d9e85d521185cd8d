"""The method of the tutorial: its page, its package, and the checks of the matrix. Nothing of it stays registered."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import millpond as mp
from millpond import registry
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.policy.view import View
from tests.helpers.matrix.checks import CHECKS
from tests.helpers.matrix.hidden import equals_a_mask
from tests.helpers.matrix.models import llama, prompts
from tests.matrix import test_invariance as matrix

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own-method"
PAGE = (ROOT / "docs" / "tutorial" / "write-your-own-method.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The code of one language on the page. Python is `py` there: it needs the file, which other pages must not see."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def vatp(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The file, imported, and registered until the test ends."""
    known = {name: METHODS.get(name) for name in METHODS.names() if name != "vatp"}
    monkeypatch.setattr(METHODS, "_entries", known)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setitem(matrix.METHODS, "vatp", {"sinks": 2, "recent": 0.25, "decode": "evict"})
    before = sys.modules.pop("vatp", None)
    yield importlib.import_module("vatp")
    del sys.modules["vatp"]
    if before is not None:
        sys.modules["vatp"] = before


def test_the_page_shows_the_files() -> None:
    assert blocks("py")[0] == (EXAMPLE / "vatp.py").read_text(encoding="utf-8")
    assert blocks("toml") == [(EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")]


def test_it_is_short() -> None:
    lines = [line for line in blocks("py")[0].splitlines() if line.strip()]
    assert len(lines) <= 30


def test_what_the_page_runs(vatp: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for code in blocks("py")[1:]:
        exec(compile(code, "write-your-own-method.md", "exec"), namespace)
    assert capsys.readouterr().out.startswith("True\n")


def test_the_score_by_hand(vatp: ModuleType) -> None:
    values = torch.tensor([[[1.0, -1.0], [0.5, 0.0], [0.0, -1.0]]])
    view = View(torch.tensor([[0, 1, 2]]), torch.tensor([[1.0, 2.0, 3.0]]), 3, 0, read_entries=lambda part: values)
    assert vatp.AttentionTimesValue().score(view, 0).tolist() == [[2.0, 1.0, 3.0]]


APPLY = ("batch", "ratio", "sizes", "bytes", "everything", "pages", "chunks", "second turn")


@pytest.mark.parametrize("check", APPLY)
def test_matrix(check: str, vatp: ModuleType) -> None:
    CHECKS[check]("vatp")


def test_drop_equals_mask(vatp: ModuleType) -> None:
    model, (ids, mask) = llama("gqa"), prompts(2)
    with torch.no_grad(), mp.compress(model, "vatp", 14, page_slots=4, decode="evict") as cache:
        equals_a_mask(model, cache, ids, mask, 10)
        assert cache.stats().evicted > 0


def test_nothing_of_it_stays() -> None:
    assert not any(entry.build.__module__ == "vatp" for entry in map(METHODS.get, METHODS.names()))


# ---------------------------------------------------------------------- the entry point


def install(project: Path, where: Path) -> None:
    """What an installation writes beside the code: name, version and entry points, from a pyproject.toml."""
    data = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    info = where / f"{data['name'].replace('-', '_')}-{data['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {data['name']}\nVersion: {data['version']}\n")
    groups = ([f"[{group}]", *(f"{k} = {v}" for k, v in e.items())] for group, e in data["entry-points"].items())
    (info / "entry_points.txt").write_text("\n".join(line for group in groups for line in group) + "\n")


@pytest.mark.slow
def test_the_commands_know_it_once_it_is_installed(tmp_path: Path) -> None:
    """Every `millpond` command of the page, in another process that has the package."""
    install(EXAMPLE / "pyproject.toml", tmp_path)
    commands = [shlex.split(line)[1:] for block in blocks("sh") for line in block.splitlines() if "millpond " in line]
    assert [command[0] for command in commands] == ["methods", "generate", "bench"]
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from millpond.cli.app import app\n"
        f"for command in {commands!r}: app(command, standalone_mode=False)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), str(EXAMPLE), os.environ.get("PYTHONPATH")]))
    known = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=known)
    assert done.returncode == 0, done.stderr
    assert "Keep the entries of much attention and large values." in done.stdout
    assert "KV" in done.stderr
    assert re.search(r"^\| `vatp` \| grows \| 0\.", done.stdout, re.MULTILINE)
    assert re.search(r"^\| `vatp:decode=evict` \| plans at each step \| 0\.", done.stdout, re.MULTILINE)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> registry.Registry[Any]:
    """A registry that an installed package adds a broken module to."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_method.py").write_text("raise RuntimeError('no such luck')\n")
    point = EntryPoint("mine", "broken_method", "millpond.methods")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    return registry.Registry("method", "millpond.methods")


def test_a_package_that_cannot_be_imported_is_named_each_time(broken: registry.Registry[Any]) -> None:
    for _ in range(2):
        with pytest.raises(OptionError, match=r"broken_method as a method.*RuntimeError: no such luck.*uninstall"):
            broken.names()
