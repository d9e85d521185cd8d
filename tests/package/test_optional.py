"""The library alone: without any extra it compresses and answers, and what needs one says which."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import millpond
from millpond.errors import OptionError
from millpond.install_command import install_command
from millpond.optional import require

#: Keeps what the extras install from being found.
BARE = """
import sys

EXTRAS = ("rich", "typer", "matplotlib", "fastapi", "uvicorn", "prometheus_client", "markdown_it", "nh3", "xgrammar")
sys.modules.update(dict.fromkeys(EXTRAS))
"""
LIBRARY = """
import millpond as mp

model, tokenizer = mp.load_model("pond-recall"), mp.load_tokenizer("pond-recall")
text = "anna kettle " + "quiet rain " * 40 + "<ask> anna <is>"
with mp.compress(model, method="h2o", budget="50%") as cache:
    inputs = tokenizer(text, return_tensors="pt")
    out = model.generate(**inputs, cache=cache, max_new_tokens=2)
    print(tokenizer.decode(out[0, -1]))
with mp.LLM("pond-recall", method="snapkv", budget=64) as llm:
    print(llm.generate(text, mp.SamplingParams(max_tokens=2, temperature=0))[0].completions[0].text.split()[-1])
    try:
        list(llm.stream(["a"], progress=True))
    except mp.OptionError as error:
        print(error, file=sys.stderr)
"""


#: Each feature behind an extra of its own, with the command line and without the libraries of any other extra.
FEATURES = """
import sys

EXTRAS = ("matplotlib", "fastapi", "uvicorn", "prometheus_client", "markdown_it", "nh3", "xgrammar")
sys.modules.update(dict.fromkeys((*EXTRAS, "gguf", "PIL", "ray", "triton", "datasets")))

from typer.testing import CliRunner

import millpond as mp
from millpond.cli.app import app
from millpond.cluster import generate_dataset
from millpond.engine.grammar import compiler
from millpond.images import reader

open("model.gguf", "wb").write(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
for command in ("serve", "batch in.jsonl --out out", "demo"):
    print(CliRunner().invoke(app, command.split()).output)
for feature in (
    lambda: mp.load_model("model.gguf"),
    lambda: generate_dataset(None, "pond-recall"),
    lambda: compiler._xgrammar("a rule"),
    reader._pillow,
    lambda: __import__("millpond.kernels.gpu"),
):
    try:
        feature()
    except mp.OptionError as error:
        print(error)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BARE + code], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_library_needs_no_extra() -> None:
    done = run(LIBRARY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kettle", "kettle"]
    assert install_command("cli") in done.stderr, "a bar of progress does"


@pytest.mark.parametrize(
    ("code", "extra"),
    [("from millpond.cli import main; main()", "cli"), ("import millpond_lab.evals.report.plots.style", "plot")],
)
def test_what_needs_an_extra_names_it(code: str, extra: str) -> None:
    done = run(code)
    assert done.returncode != 0
    assert install_command(extra) in done.stderr


@pytest.mark.slow
def test_every_feature_behind_an_extra_names_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FEATURES], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    for extra in ("server", "plot", "gguf", "cluster", "constrained", "vision", "gpu"):
        assert install_command(extra) in said, f"{extra}: {said}"
    assert said.count(install_command("server")) == 2, "serve and batch"


def test_a_library_that_is_there_is_handed_over() -> None:
    assert require("json", "plot", "drawing").dumps([1]) == "[1]"


def test_one_that_is_missing_is_an_option_error() -> None:
    said = re.escape(f"drawing needs nothing_here; install it with: {install_command('plot')}")
    with pytest.raises(OptionError, match=said):
        require("nothing_here.deep", "plot", "drawing")


def test_one_that_another_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import nothing_here.deep\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OptionError, match=r"^drawing needs nothing_here; install it with"):
        require("needs_more", "plot", "drawing")


def test_what_the_lab_measures_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    home = millpond._HOME["fit"]
    monkeypatch.setitem(sys.modules, home, None)
    monkeypatch.delitem(vars(millpond), "fit", raising=False)
    said = re.escape(f"mp.fit needs {home}; install it with: {install_command('lab')}")
    with pytest.raises(OptionError, match=f"^{said}$"):
        _ = millpond.fit
    assert "fit" in dir(millpond)
