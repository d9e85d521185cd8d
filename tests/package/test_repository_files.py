"""Workflows, issue templates and hooks: they parse, and name files, targets and Pythons that exist."""

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
TEMPLATES = sorted(p for p in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if p.name != "config.yml")
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


def test_all_are_found() -> None:
    assert [w.name for w in WORKFLOWS] == ["docs.yml", "publish.yml", "test.yml"]
    assert [t.name for t in TEMPLATES] == ["bug.yml", "feature.yml", "method.yml"]
    assert {"lint", "types", "docs", "test"} <= TARGETS


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda w: w.stem)
def test_a_workflow_runs_what_exists(workflow: Path) -> None:
    content = parsed(workflow)
    assert content["name"] == workflow.stem
    assert content[True]  # `on`, which YAML reads as a truth value
    jobs = content["jobs"]
    for name, job in jobs.items():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs), name
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
        else:
            assert job["runs-on"]
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step)
        for line in step.get("run", "").splitlines():
            assert_runs(line)
        assert "@" in step.get("uses", "@"), "an action of no version"
    for name in NAMED.findall(workflow.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


def test_the_tests_run_on_each_python_that_the_package_names() -> None:
    versions = [c.rsplit(" ", 1)[1] for c in PROJECT["project"]["classifiers"] if re.search(r"Python :: 3\.\d", c)]
    job = parsed(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == versions
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"
    assert {"run": ".ci/run"} in job["steps"]


def test_the_site_is_published_from_where_it_is_built() -> None:
    site = re.search(r"^site_dir: (.+)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert site is not None
    paths = [step["with"]["path"] for step in steps(WORKFLOWS[0]) if "upload" in step.get("uses", "")]
    assert paths == [site[1]]


def test_wheels_are_built_for_each_platform_and_tried() -> None:
    config = PROJECT["tool"]["cibuildwheel"]
    platforms = {name.split("-", 1)[1] for name in config["build"]}
    assert platforms == {"manylinux_x86_64", "manylinux_aarch64", "macosx_arm64"}
    systems = parsed(ROOT / ".github" / "workflows" / "publish.yml")["jobs"]["wheels"]["strategy"]["matrix"]["system"]
    assert len(systems) == len(platforms)
    _, script = config["test-command"].split(" {project}/")
    assert (ROOT / script).is_file()


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.stem)
def test_an_issue_template_is_a_form(template: Path) -> None:
    form = parsed(template)
    assert {"name", "description", "labels", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
    assert all(field["attributes"]["label"] for field in fields)
    for name in NAMED.findall(template.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


def test_what_the_bug_form_wants_to_know_can_be_printed() -> None:
    form = parsed(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")
    facts = next(field for field in form["body"] if field.get("id") == "facts")["attributes"]["description"]
    _, flag, code = shlex.split(facts.split("`")[1])
    done = subprocess.run([sys.executable, flag, code], capture_output=True, text=True, check=True)
    assert re.search(r"^\d+\.\d+\S* \S+ 2\.\d+", done.stdout), done.stdout


def test_hooks_need_nothing_but_this_checkout() -> None:
    repos = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    for hook in repos[0]["hooks"]:
        assert hook["language"] == "system"
        assert_runs(hook["entry"])


def test_the_tracked_files_stay_small() -> None:
    """58 MiB: what a machine with a GPU takes along, with some room."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) <= 58 * 2**20
