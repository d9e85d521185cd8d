"""What users and their programs know by name is as it was; a change that is meant is written down.

`python -m tests.helpers.formats.write texts` writes it down.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.formats.registered as registered
from tests.helpers.formats.texts import FOLDER, VERSIONS, texts, versions

NAMES = ("commands.txt", "openapi.json", "metrics.txt", "names.txt", "methods.txt")
MODULE = """
from millpond.plugins import Policy, Recency, method

@method("{name}")
def build() -> Policy:
    \"\"\"Keep the newest.\"\"\"
    return Policy(Recency())
"""
TASK = """
from millpond_lab.evals.task import task

@task("{name}")
class Kept:
    \"\"\"Nothing.\"\"\"

    kind = "generate"
"""


@cache
def now() -> dict[str, str]:
    return texts()


def lines(name: str, text: str) -> Sequence[str]:
    if not name.endswith(".json"):
        return text.splitlines()
    return json.dumps(json.loads(text), indent=1, sort_keys=True).splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_a_text(name: str) -> None:
    kept, found = lines(name, (FOLDER / name).read_text(encoding="utf-8")), lines(name, now()[name])
    if kept == found:
        return
    of: dict[str, Any] = json.loads(VERSIONS.read_text(encoding="utf-8"))
    other = [f"{package} {of[package]} then, {here} now" for package, here in versions().items() if of[package] != here]
    told = "\n".join(difflib.unified_diff(kept, found, "kept", "now", n=2, lineterm=""))
    pytest.fail(
        f"{name} differs ({'; '.join(other) or 'same versions'}); if it is meant: "
        f"python -m tests.helpers.formats.write texts\n{told[:6000]}",
        pytrace=False,
    )


def test_every_text_is_compared() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*NAMES, VERSIONS.name}
    assert now().keys() == {*NAMES}


def test_other_packages_add_methods_and_tasks_under_the_names_of_their_groups(tmp_path: Path) -> None:
    (tmp_path / "kept_method.py").write_text(MODULE.format(name="kept_method"), encoding="utf-8")
    (tmp_path / "kept_task.py").write_text(TASK.format(name="kept_task"), encoding="utf-8")
    about = tmp_path / "kept-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kept\nVersion: 1.0\n", encoding="utf-8")
    groups = {"millpond.methods": "kept_method", "millpond.evals.tasks": "kept_task"}
    points = "".join(f"[{group}]\nkept = {module}\n" for group, module in groups.items())
    (about / "entry_points.txt").write_text(points, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, registered.__file__, *groups.values(), "h2o"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.split() == ["h2o", "kept_method", "kept_task"]
