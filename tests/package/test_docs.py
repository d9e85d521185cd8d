"""Generated pages are current, snippets run, links lead somewhere."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import inspect
import io
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from millpond import errors
from millpond.cli.app import app
from millpond.methods.kvzip import kvzip
from millpond.models.downloads import DOWNLOADS
from millpond_lab.pond.words import UNK
from tests.helpers.evals.scored import row
from tests.helpers.package.snippets import FAILURES, agrees, outputs, snippets

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#]+?)\)")
WITH_CODE = [page for page in PAGES if snippets(page.read_text(encoding="utf-8"))]
SOURCE = ROOT / "src"
WITH_EXAMPLE = sorted(
    ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
    for source in (SOURCE, ROOT / "packages" / "millpond-lab" / "src")
    for file in source.rglob("*.py")
    if ">>> " in file.read_text(encoding="utf-8")
)


#: What kvzip itself puts behind a text, whatever the model.
OF_KVZIP = inspect.signature(kvzip).parameters["ask"].default


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _marked(page: Path) -> Any:
    """The page, marked real where its code names a model that is downloaded."""
    code = "".join(one.code for one in snippets(page.read_text(encoding="utf-8")))
    real = any(f'"{download.name}"' in code for download in DOWNLOADS)
    return pytest.param(page, marks=pytest.mark.real if real else ())


@pytest.fixture
def unknown_words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that became tokens among which is the bundled tokenizer's mark of an unknown word."""
    found: list[str] = []
    encode = PreTrainedTokenizerFast.__call__

    def noting(self: Any, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        encoded = encode(self, text, *args, **kwargs)
        ids = torch.as_tensor(encoded["input_ids"]).flatten().tolist() if "input_ids" in encoded else []
        if self.unk_token == UNK and self.unk_token_id in ids and text != OF_KVZIP:
            found.append(str(text))
        return encoded

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", noting)
    return found


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


def test_figures_in_sentences_are_replaced(generator: ModuleType) -> None:
    figures = {"aware h2o mean": 0.5446, "points of h2o": 7.2}
    page = "has <!-- aware h2o mean .2f -->0.60<!-- / --> and <!-- points of h2o +.0f -->+3<!-- / --> points"
    filled = "has <!-- aware h2o mean .2f -->0.54<!-- / --> and <!-- points of h2o +.0f -->+7<!-- / --> points"
    assert generator.fill_figures(page, figures) == filled
    assert generator.fill_figures(filled, figures) == filled
    with pytest.raises(SystemExit, match=r"'aware ada mean'; some that begin so: aware h2o mean"):
        generator.fill_figures("<!-- aware ada mean .2f -->0.60<!-- / -->", figures)
    with pytest.raises(SystemExit, match="1 figures end and 0 begin"):
        generator.fill_figures("<!--aware h2o mean .2f -->0.60<!-- / -->", figures)


def test_figures_and_verdicts_follow_the_rows(generator: ModuleType) -> None:
    quality = importlib.import_module("generated.quality_page")
    rows = quality.read_rows(quality.QUALITY / "aware")
    before = quality.leaderboard_figures("aware", rows)
    place = next(place for place, row in enumerate(rows) if row.method == "h2o")
    rows[place] = replace(rows[place], score=rows[place].score + 0.5)
    after = quality.leaderboard_figures("aware", rows)
    assert after["aware h2o mean"] == pytest.approx(before["aware h2o mean"] + 0.05)
    assert after[f"aware h2o {quality.task_of(rows[place])}"] == rows[place].score
    findings = quality.read_findings(quality.QUALITY / "orderings.json")
    quality.check_pairs(findings)
    with pytest.raises(SystemExit, match="the first is ahead in"):
        quality.check_pairs([replace(one, low=-one.high) for one in findings])


def test_claims_of_papers_have_rows_and_verdicts(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    form = importlib.import_module("generated.claims.form")
    assert doctest.testmod(form).failed == 0
    for claim in importlib.import_module("generated.claims.table").CLAIMS:
        if isinstance(claim.tried, str):
            continue
        found = claim.tried()
        assert (ROOT / "benchmarks" / "results" / found.rows).exists()
        assert not found.script.startswith("benchmarks/") or (ROOT / found.script).exists()
        assert found.verdict in {form.REPRODUCED, form.PARTLY, form.CONTRADICTED, form.UNSEEN}
    h2o = importlib.import_module("generated.claims.h2o")
    rows = h2o.read("h2o-parts-real")
    for one in rows:
        if one["method"] == "no_heavy:sinks=4":
            one["low"], one["high"] = -0.5, -0.4
    monkeypatch.setattr(h2o, "read", lambda name: rows)
    assert h2o.heavy_hitters_carry().verdict == form.CONTRADICTED


@pytest.mark.parametrize("page", [_marked(page) for page in WITH_CODE], ids=name)
def test_snippets_run_and_print_what_the_page_shows(page: Path, unknown_words: list[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for code, shown in snippets(page.read_text(encoding="utf-8")):
        for download in DOWNLOADS:
            if f'"{download.name}"' in code and not download.at_hand:
                pytest.skip(f"{download.name} is not on this machine: {download.command}")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, name(page), "exec"), namespace)
        printed = out.getvalue()
        assert printed == "" if shown is None else agrees(shown, printed), f"{code}\nprints\n{printed}"
        assert not FAILURES.search(printed), f"{code}\nprints\n{printed}"
    assert not unknown_words, "the bundled model knows words of its own list alone"


def test_commands_print_what_the_page_shows() -> None:
    shown = {page: commands for page in PAGES if (commands := _commands_with_output(page))}
    assert [name(page) for page in shown] == ["docs/reference/cli.md"]
    for commands in shown.values():
        for command, text in commands:
            called = CliRunner().invoke(app, shlex.split(command)[1:], env={"COLUMNS": "300", "NO_COLOR": "1"})
            assert called.exit_code == 0, called.output
            assert agrees(text, called.output), f"{command}\nprints\n{called.output}"


def _commands_with_output(page: Path) -> list[tuple[str, str]]:
    """Commands whose output a page shows: each is the only line of its block."""
    found = [one for language in ("sh", "bash") for one in snippets(page.read_text(encoding="utf-8"), language)]
    return [(code.strip(), shown) for code, shown in found if shown is not None]


def test_every_text_of_a_page_is_an_output() -> None:
    """Those that are none are named here, with what they are."""
    besides = {
        "docs/how-to/install.md": "the demo on a real model, which test_demo_real_text compares",
        "docs/how-to/troubleshooting.md": "the tree of errors, which the next test compares with theirs",
    }
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shown = [one.shown for language in ("python", "sh", "bash") for one in snippets(text, language)]
        free = [one for one in outputs(text) if one not in shown]
        assert bool(free) == (name(page) in besides), f"{name(page)}: {free}"


def test_the_readme_is_read_in_half_a_minute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.sub(r"<!--.*?-->", "", text)
    assert len([word for word in shown.split() if re.search(r"\w", word)]) <= 500
    assert len(re.findall(r"(?<!!)\[[^]]*\]\(", text)) <= 6


def test_figures_of_the_readme_are_generated() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    free = re.sub(r"```.*?```|<!-- board -->.*?<!-- /board -->|<!-- [^>]*-->[^<]*<!-- / -->", "", text, flags=re.DOTALL)
    figures = re.findall(r"\d[\d.,]* ?(?:%|x\b|ms\b|s\b|[KMG]i?B\b|tokens)", free)
    assert figures == ["95 %"], "a figure beside the generated table: only the width of its intervals is one"


def test_the_contents_name_every_page() -> None:
    page = ROOT / "docs" / "contents.md"
    named = {(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))}
    methods = ROOT / "docs" / "reference" / "methods"
    there = {one for one in (ROOT / "docs").rglob("*.md") if one.parent != methods} - {page}
    assert there | {methods / "README.md"} == {one for one in named if ROOT / "docs" in one.parents}


def test_the_tree_of_errors_is_theirs() -> None:
    """Deeper is derived from what stands above it; in brackets stands a class of Python."""
    (tree,) = outputs((ROOT / "docs" / "how-to" / "troubleshooting.md").read_text(encoding="utf-8"))
    kinds = _kinds_of(errors.MillpondError)
    above: list[type] = []
    for line in tree.splitlines():
        found = re.fullmatch(r"([ │├└─]*)(\w+)(?: \((\w+)\))?", line)
        assert found is not None, line
        kind, depth = kinds[found[2]], len(found[1]) // 4
        assert depth == 0 or above[depth - 1] in kind.__bases__, line
        assert found[3] is None or found[3] in [base.__name__ for base in kind.__mro__], line
        above[depth:] = [kind]


def _kinds_of(kind: type) -> dict[str, type]:
    for module in ("millpond.cluster.handle", "millpond.cluster.worker"):
        importlib.import_module(module)
    return {kind.__name__: kind, **{n: k for one in kind.__subclasses__() for n, k in _kinds_of(one).items()}}


def test_code_that_is_not_run_is_named() -> None:
    """Blocks in `py` are shown only; all in `python` run."""
    besides = {
        "docs/tutorial/write-your-own-method.md": "files of a folder, which test_own_method compares and runs",
        "docs/how-to/cluster.md": "starts Ray and its processes",
        "docs/how-to/budgets.md": "reads a novel, for minutes",
        "docs/how-to/reuse-texts.md": "calibrates a model, for minutes",
        "docs/how-to/from-kvpress.md": "names a model that is not here",
        "docs/how-to/special-models.md": "loads a model of many gigabytes",
        "docs/how-to/vllm.md": "runs vLLM, which has an environment of its own",
    }
    assert {name(page) for page in PAGES if snippets(page.read_text(encoding="utf-8"), "py")} == set(besides)


@pytest.mark.parametrize(
    ("shown", "printed", "right"),
    [
        ("a b\n", "a b\n", True),
        ("a b\n", "a b \n", True),
        ("a b\n", "a c\n", False),
        ("a b\n", "a b\nc\n", False),
        ("a b\nc\n", "a b\n", False),
        ("a ... s\n", "a 1.5 s\n", True),
        ("a ... s\n", "a 1\n2 s\n", False),
        ("a.c\n", "abc\n", False),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\nd\n", "a\nd\n", True),
        ("a\n...\nd\n", "a\nb\n", False),
    ],
)
def test_what_a_page_shows_is_compared_by_lines(shown: str, printed: str, right: bool) -> None:
    assert agrees(shown, printed) is right


def test_an_output_follows_its_block_at_once() -> None:
    page = """```python\n1\n```\n\n```text\nnone\n```\n   ```python\n   2\n   ```\n\nIt is:\n\n```text\nb\n```\n"""
    assert snippets(page) == [("1\n", "none\n"), ("2\n", None)]
    assert outputs(page) == ["none\n", "b\n"]


@pytest.mark.parametrize("module", WITH_EXAMPLE)
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed


def test_the_files_that_the_architecture_names_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests)/[\w/.]+)`", page)
    assert len(set(named)) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_result_has_a_day(generator: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = sys.modules["generated.results_page"]
    dates = json.loads(page.DATES.read_text(encoding="utf-8"))
    assert dates.keys() == page.entries().keys()
    shown = page.results_page({})
    assert f"| {dates['batch']} | [batch](batch.md) |" in shown
    lost = tmp_path / "dates.json"
    lost.write_text(json.dumps({name: day for name, day in dates.items() if name != "batch"}))
    monkeypatch.setattr(page, "DATES", lost)
    with pytest.raises(SystemExit, match=r"batch; run benchmarks/results_dates\.py"):
        page.results_page({})
