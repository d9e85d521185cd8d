"""The documentation site: every page is reachable, its links lead somewhere, and what pages list is complete."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from millpond import errors
from millpond.methods import METHODS
from tests.package.test_docs import PAGES, ROOT, generator
from tests.package.test_imports import PARTS, RANK

__all__ = ["generator"]  # a fixture

SOURCES = sorted(file for folder in ("src", "packages/millpond-lab/src") for file in (ROOT / folder).rglob("*.py"))
BY_HAND = [page for page in PAGES if "<!-- written by" not in page.read_text(encoding="utf-8")[:100]]
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LIST_ITEM = re.compile(r" *(\*|-|\d+\.) ")


def module_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return module_of("site_hooks")


def test_every_page_is_in_the_navigation_once(hooks: ModuleType) -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)  # tags are not looked at
    leaves = hooks.leaves(config["nav"])
    folders = [path for path in leaves if path.endswith("/")]
    named = [hooks.repository_path(path) for path in leaves if not path.endswith("/")]
    named += [str(page.relative_to(ROOT)) for folder in folders for page in (ROOT / "docs" / folder).glob("*.md")]
    assert sorted(path for path in named if path.startswith("docs/") or path == "README.md") == sorted(
        str(page.relative_to(ROOT)) for page in PAGES
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("README.md", "docs/how-to/serve.md", "how-to/serve.md"),
        ("README.md", "CONTRIBUTING.md", "CONTRIBUTING.md"),
        ("docs/how-to/serve.md", "../../README.md", "../index.md"),
        ("docs/how-to/serve.md", "../explanation/engine.md#clients", "../explanation/engine.md#clients"),
        ("docs/explanation/speed.md", "../../benchmarks/results/methods.md", "../benchmarks/results/methods.md"),
        ("CONTRIBUTING.md", "docs/explanation/architecture.md", "explanation/architecture.md"),
        ("docs/leaderboard.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(hooks: ModuleType, page: str, link: str, there: str) -> None:
    assert hooks.rewrite(f"see [it]({link}).", page) == f"see [it]({there})."


def test_linked_files_outside_of_docs_are_part_of_the_site(hooks: ModuleType) -> None:
    found = hooks.outside({"docs/explanation/speed.md", "README.md"})
    assert {"benchmarks/results/methods.md", "CONTRIBUTING.md", "README.md"} <= found


@pytest.fixture(scope="module")
def form() -> ModuleType:
    return module_of("sentences")


def test_one_sentence_per_line(form: ModuleType) -> None:
    wrapped = [page for page in form.by_hand() if form.one_per_line(page.read_text("utf-8")) != page.read_text("utf-8")]
    assert not wrapped, "run python docs/sentences.py"


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("One\nsentence. And two.", "One sentence.\nAnd two."),
        ("* Of a\n  list. Two.\n* Next.", "* Of a list.\n  Two.\n* Next."),
        ("12. Of a\nlist. Two.", "12. Of a list.\n    Two."),
        ("**Lead.** It stays. (Aside. It stays.) `a. B` too.", "**Lead.** It stays.\n(Aside. It stays.)\n`a. B` too."),
        ("By A. Author et al. Then e.g. This.", "By A. Author et al. Then e.g. This."),
        ("```sh\na. B\nc\n```\n| a. B |\n| c |", "```sh\na. B\nc\n```\n| a. B |\n| c |"),
        ("# A. B\n\n<p>A. B\n\nIt is 1.5. Two", "# A. B\n\n<p>A. B\n\nIt is 1.5.\nTwo"),
    ],
)
def test_only_prose_is_split(form: ModuleType, text: str, split: str) -> None:
    assert form.one_per_line(text) == split
    assert form.one_per_line(split) == split


@pytest.mark.parametrize("page", BY_HAND, ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_and_tables_begin_a_block(page: Path) -> None:
    """Else a Git host shows them and the site does not."""
    lines = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    swallowed = [
        line
        for above, line in itertools.pairwise(lines)
        if (line.startswith(("* ", "- ", "1. ", "| ")))
        and above.strip()
        and not LIST_ITEM.match(above)
        and not above.startswith(("#", "|", "  ", "<!--"))
    ]
    assert not swallowed


def variables(tree: ast.Module) -> Iterator[str]:
    """Names of environment variables that a module reads or sets."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and "environ" in ast.unparse(node.func) and node.args:
            key = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            key = node.slice
        else:
            key = node if isinstance(node, ast.Constant) else ast.Constant("")
        value = constants.get(key.id, "") if isinstance(key, ast.Name) else getattr(key, "value", "")
        if (
            isinstance(value, str)
            and re.fullmatch(r"[A-Z]+(_[A-Z]+)+", value)
            and (key is not node or re.match("MILLPOND_|OMP_|OPENBLAS_|MKL_|OPENAI_|TRITON_", value))
        ):
            yield value


def test_every_environment_variable_is_on_its_page() -> None:
    read = {name for file in SOURCES for name in variables(ast.parse(file.read_text(encoding="utf-8")))}
    native = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.?pp"))
    read |= set(re.findall(r'getenv\("(\w+)"\)', native))
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))
    read |= set(re.findall(r'environ\.(?:get|setdefault)\("((?:MILLPOND|TRITON)_\w+)"', tests))
    assert {"MILLPOND_KERNELS", "MILLPOND_ISA", "MILLPOND_API_KEYS", "OPENAI_API_KEY"} <= read
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", page.split("\n## ", 1)[1])) == read


def classes(ending: str) -> set[str]:
    """Names of the public classes of the sources that end so, but for errors that are not Millpond's own kind."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in SOURCES)
    found = re.findall(r"^class (\w+)\((.*)\):", text, re.MULTILINE)
    return {name for name, base in found if name.endswith(ending) and base != "Exception"}


def test_every_error_and_warning_has_a_cause_and_a_way_out() -> None:
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.{20,}?) \| (.{20,}?) \|$", page, re.MULTILINE)
    assert "StaleKernelsError" in classes("Error")
    assert {name for name, _, _ in rows} == classes("Error") | classes("Warning")
    assert [name for name in re.findall(r"\w+Error", errors.__doc__ or "") if name not in page] == []


def test_the_status_of_errors_is_that_of_the_server() -> None:
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    server = pytest.importorskip("millpond.server.errors", reason="pip install 'millpond[server]'")
    shown = re.findall(r"^\| `(\w+)` \| (\d+) \| `(\w+)`", page, re.MULTILINE)
    assert shown == [(kind.__name__, str(status), code) for kind, status, code in server._STATUS]


def test_the_installation_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    table = page[page.index("\n## Extras\n") :].split("\n## ")[1]
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == set(extras)


def test_the_architecture_names_every_package_in_the_order_of_imports() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    table = page[page.index("## Which package imports which") :]
    shown = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)]
    ranks = [RANK["millpond", name] for row in shown for name in row]
    assert ranks == sorted(ranks)
    assert {name for row in shown for name in row} == {part for package, part in PARTS if package == "millpond"}


def test_every_paper_has_a_row_with_a_test_that_names_it(generator: ModuleType) -> None:
    page = (ROOT / "docs" / "reference" / "papers.md").read_text(encoding="utf-8")
    for name in METHODS.names():
        if not METHODS.get(name).paper:
            continue
        row = next(line for line in page.splitlines() if line.startswith(f"| [`{name}`]"))
        module, test = re.findall(r"\]\(\.\./\.\./([\w/.]+)\)", row)
        assert f'@method("{name}"' in (ROOT / module).read_text(encoding="utf-8")
        assert re.search(rf'["\'/]{name}\b', (ROOT / test).read_text(encoding="utf-8")), f"{test} does not name {name}"
        measured = re.findall(r"\d+\.\d% \(\d", row)
        own = (ROOT / "docs" / "reference" / "methods" / f"{name}.md").read_text(encoding="utf-8")
        assert all(score in own for score in measured)
        assert measured or "## Quality" not in own


@pytest.mark.parametrize(
    ("number", "missing"),
    [
        ("2402.15220", ("16,384 spared entries",)),
        ("2412.03594", ("Horizontal fusion for decoding steps", "each prompt reads")),
        ("2502.15734", ("free room", "focus")),
        ("2210.02775", ("Phase bits", "discard bits")),
        ("2303.06865", ("by layers", "simulated device")),
        ("2401.09670", ("one at a time", "vLLM")),
    ],
)
def test_papers_on_serving_have_a_row_with_what_is_missing(number: str, missing: tuple[str, ...]) -> None:
    page = (ROOT / "docs" / "reference" / "papers.md").read_text(encoding="utf-8")
    *_, row = [line for line in page.splitlines() if line.startswith("| ") and f"abs/{number})" in line]
    *_, measured, departs = row.removesuffix(" |").split(" | ")
    assert all(words in departs for words in missing)
    files = [ROOT / file for file in re.findall(r"\]\(\.\./\.\./([\w/.-]+)\)", row)]
    modules, tests, (rows,) = (
        [file for file in files if any(file.is_relative_to(ROOT / part) for part in parts)]
        for parts in (("src", "packages"), ("tests",), ("benchmarks",))
    )
    assert tests
    assert any(f"arXiv:{number}" in file.read_text(encoding="utf-8") for file in modules)
    kept = rows.read_text(encoding="utf-8")
    told = re.findall(r"\d*\.\d+", measured.partition("):")[2])
    figures = [found if found[0] != "." else f"0{found}" for found in told]
    assert len(figures) >= 2
    assert all(figure in kept for figure in figures)


#: The systems that this project is about, by the names in the rows of the page or the numbers of their papers.
SYSTEMS = (
    *("h2o", "fastgen", "ada", "snapkv", "pyramidkv", "streaming", "kvmerger", "cam", "d2o", "ems", "elastic"),
    *("attention_gate", "locret", "kvquant4", "mikv", "think"),
    *("abs/2402.15220", "abs/2303.06865", "abs/2412.03594", "abs/2502.15734", "abs/2401.09670", "abs/2210.02775"),
)


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_system_is_missing_on_the_papers_page(system: str) -> None:
    """It has a module and a test, and is measured: on the page itself, or in rows that the row or its page names."""
    page = (ROOT / "docs" / "reference" / "papers.md").read_text(encoding="utf-8")
    named = f"{system})" if system.startswith("abs/") else f"`{system}`"
    row = [line for line in page.splitlines() if line.startswith("| ") and named in line][-1]
    assert re.search(r"\]\(\.\./\.\./(src|packages)/", row)
    assert re.search(r"\]\(\.\./\.\./tests/", row)
    own = ROOT / "docs" / "reference" / "methods" / f"{system}.md"
    told = row + (own.read_text(encoding="utf-8") if own.exists() else "")
    if system == "think":
        told = (ROOT / "docs" / "how-to" / "codecs.md").read_text(encoding="utf-8").partition("`think:0.5:0.25`")[2]
    assert re.search(r"\d%|\d %|benchmarks/results", told)


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings_handlers.python", reason="pip install 'millpond[docs]' to build the site")
    pytest.importorskip("material", reason="pip install 'millpond[docs]' to build the site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "millpond.compress" in (tmp_path / "reference" / "api" / "index.html").read_text(encoding="utf-8")
