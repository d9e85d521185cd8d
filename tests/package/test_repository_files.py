"""What no check of syntax sees in the files of the repository: targets, paths, Pythons and sizes that do not match."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
#: A file or folder of the repository as text names it.
NAMED = re.compile(r"(?<![\w/.-])((?:\.ci|\.github|docs|examples|packages|src|tests)/[\w./-]*\w|[A-Z]{4,}\.md)")


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in parsed(workflow)["jobs"].values() for step in job.get("steps", [])]


def assert_runs(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        targets = {word for word in words[1:] if "=" not in word}
        assert targets, command
        assert targets <= TARGETS
    elif words[0].startswith("."):
        assert (ROOT / words[0]).stat().st_mode & 0o111, f"{words[0]} cannot be executed"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda w: w.stem)
def test_a_workflow_runs_what_exists(workflow: Path) -> None:
    for job in parsed(workflow)["jobs"].values():
        assert "uses" not in job or (ROOT / job["uses"]).is_file()
    for step in steps(workflow):
        for line in step.get("run", "").splitlines():
            assert_runs(line)


@pytest.mark.parametrize("file", [*WORKFLOWS, *FORMS], ids=lambda f: f.name)
def test_the_files_that_a_workflow_or_a_form_names_exist(file: Path) -> None:
    assert [name for name in NAMED.findall(file.read_text(encoding="utf-8")) if not (ROOT / name).exists()] == []


def test_the_tests_run_on_each_python_that_the_package_names() -> None:
    versions = [c.rsplit(" ", 1)[1] for c in PROJECT["project"]["classifiers"] if re.search(r"Python :: 3\.\d", c)]
    job = parsed(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == versions
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"


def test_the_site_is_published_from_where_it_is_built() -> None:
    site = re.search(r"^site_dir: (.+)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert site is not None
    paths = [step["with"]["path"] for step in steps(WORKFLOWS[0]) if "upload" in step.get("uses", "")]
    assert paths == [site[1]]


@pytest.mark.slow
def test_what_the_bug_form_wants_to_know_can_be_printed() -> None:
    form = parsed(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")
    facts = next(field for field in form["body"] if field.get("id") == "facts")["attributes"]["description"]
    _, flag, code = shlex.split(facts.split("`")[1])
    done = subprocess.run([sys.executable, flag, code], capture_output=True, text=True, check=True)
    assert re.search(r"^\d+\.\d+\S* \S+ 2\.\d+", done.stdout), done.stdout


def test_the_tracked_files_stay_small() -> None:
    """61 MiB: what a machine with a GPU takes along, with some room."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) <= 61 * 2**20
