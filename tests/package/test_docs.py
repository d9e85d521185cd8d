"""Generated pages are current, snippets run, links lead somewhere."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from millpond.models.downloads import DOWNLOADS
from tests.helpers.evals.scored import row

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]+?)\)")
WITH_CODE = [page for page in PAGES if SNIPPET.search(page.read_text(encoding="utf-8"))]
SOURCE = ROOT / "src"
WITH_EXAMPLE = sorted(
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for file in (SOURCE / "millpond").rglob("*.py")
    if ">>> " in file.read_text(encoding="utf-8")
)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current(generator: ModuleType) -> None:
    stale = [
        name(p) for p, text in generator.pages().items() if not p.exists() or p.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run make docs-pages"


def test_pictures_are_current(generator: ModuleType) -> None:
    shown = generator.pictures()
    assert not [name(path) for path in shown if not generator.is_current(path, generator.digest(shown[path]))], (
        "run make docs-pages"
    )
    assert set((ROOT / "docs" / "images" / "quality").glob("*")) <= set(shown)


def test_a_page_has_a_curve_where_there_are_results(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("full", "t", 1.0), row("h2o", "t", 0.5, "5%"), row("h2o", "t", 0.75)]
    monkeypatch.setattr(generator, "curve_rows", lambda: rows)
    pages = generator.pages()
    folder = ROOT / "docs" / "reference" / "methods"
    assert "| aware | 5% | 50.0% (48.0% to 52.0%) | 20.0% |" in pages[folder / "h2o.md"]
    assert "![Quality of h2o over budgets](../../images/quality/h2o.svg)" in pages[folder / "h2o.md"]
    assert "## Quality" not in pages[folder / "snapkv.md"]
    assert [path.name for path in generator.pictures()] == ["h2o.svg"]


def test_no_page_of_a_method_that_is_gone(generator: ModuleType) -> None:
    folder = ROOT / "docs" / "reference" / "methods"
    assert set(folder.glob("*.md")) <= set(generator.pages())


def test_a_stale_part_is_replaced(generator: ModuleType) -> None:
    assert generator.fill("a <!-- x -->old<!-- /x --> b", "x", "new") == "a <!-- x -->\nnew\n<!-- /x --> b"
    with pytest.raises(SystemExit, match="lacks"):
        generator.fill("a", "x", "new")


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_snippets_run(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for code in SNIPPET.findall(page.read_text(encoding="utf-8")):
        for download in DOWNLOADS:
            if f'"{download.name}"' in code and not download.at_hand:
                pytest.skip(f"{download.name} is not on this machine: {download.command}")
        exec(compile(code, name(page), "exec"), namespace)


@pytest.mark.parametrize("module", WITH_EXAMPLE)
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed


def test_the_readme_shows_code_first() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.findall(r"^```(\w+)\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)[0]
    assert first[0] == "sh"
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == ["make demo", "make test"]


def test_the_files_that_the_architecture_names_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests)/[\w/.]+)`", page)
    assert len(set(named)) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
