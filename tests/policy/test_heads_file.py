"""Files of retaining heads: written and read, and every broken one refused before its numbers are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

import millpond as mp
from millpond.errors import CacheMismatchError, DataError, OptionError
from millpond.hf import retaining_heads
from millpond.hf.calibration.load import model_mark
from millpond.hf.retaining_heads import gates_finder, heads_finder
from millpond.models import installed
from millpond.models.installed import SEPARATE, heads_files, installed_folder
from millpond.models.load import load_model
from millpond.policy.trained.file import about_file, heads_of, save_heads
from millpond_lab.bench.methods.candidate import random_heads
from tests.helpers.matrix.models import llama
from tests.helpers.models import needs_pond_text
from tests.helpers.random_heads import HEADS_OF_PACKAGE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "heads.safetensors"
    save_heads(random_heads(llama()), file)
    return file


def test_written_and_read(path: Path) -> None:
    heads, given = heads_of(path.read_bytes(), "here"), random_heads(llama())
    assert (heads.model, heads.name) == (given.model, given.name)
    assert len(heads.layers) == 2
    for read, made in zip(heads.layers, given.layers, strict=True):
        assert torch.equal(read.w1.float(), made.w1.bfloat16().float())
        assert torch.equal(read.quantiles, made.quantiles)
    assert about_file(path)["kind"] == "retain"
    assert heads.digest != given.digest  # weights were rounded
    assert heads_of(path.read_bytes(), "there").digest == heads.digest


def changed(content: bytes, change: Callable[[dict[str, str]], None]) -> bytes:
    """The same file with other metadata."""
    length = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + length])["__metadata__"]
    change(about)
    return save(load(content), about)


def renamed(content: bytes, change: Callable[[dict[str, torch.Tensor]], None]) -> bytes:
    """The same file with other tensors."""
    length = int.from_bytes(content[:8], "little")
    tensors = load(content)
    change(tensors)
    return save(tensors, json.loads(content[8 : 8 + length])["__metadata__"])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda c: c[:4], "ends inside its header"),
        (lambda c: c[:200], "ends inside its header"),
        (lambda c: c[:-100], "is torn"),
        (lambda c: c + b"more", "is torn"),
        (lambda c: b"PK\x03\x04" + c, "no safetensors file|ends inside"),
        (lambda c: changed(c, lambda a: a.update(format="other 1")), "format is 'other 1'"),
        (lambda c: changed(c, lambda a: a.update(kind="gate")), "of the kind 'gate'"),
        (lambda c: changed(c, lambda a: a.pop("facts")), "lacks model, name, layers or facts"),
        (lambda c: changed(c, lambda a: a.update(layers="3")), "do not make 3 layers"),
        (lambda c: changed(c, lambda a: a.update(layers="-1")), "do not make -1 layers"),
        (lambda c: renamed(c, lambda t: t.pop("1.b1")), "do not make 2 layers"),
        (lambda c: renamed(c, lambda t: t.update({"0.b1": torch.zeros(3)})), "layer 0 has shapes"),
        (lambda c: renamed(c, lambda t: t.update({"0.b2": torch.zeros(0)})), "layer 0 has shapes"),
        (lambda c: renamed(c, lambda t: t.update({"1.b2": t["1.b2"] * torch.nan})), "not finite"),
    ],
)
def test_broken_files_are_refused(path: Path, broken: Callable[[bytes], bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        heads_of(broken(path.read_bytes()), "here")
    path.write_bytes(broken(path.read_bytes()))
    with pytest.raises(OptionError, match=message):
        mp.compress(llama(), "locret", 16, heads=str(path))


def test_a_missing_file_and_another_models(path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        mp.compress(llama(), "locret", 16, heads="nowhere.safetensors")
    with pytest.raises(CacheMismatchError, match="trained for another model"):
        mp.compress(load_model("pond-recall"), "locret", 16, heads=str(path))
    with pytest.raises(CacheMismatchError, match="trained for another model"):
        mp.LLM("pond-recall", method="locret", options={"heads": str(path)}, budget=16)


def test_a_model_without_heads_is_told_how_to_train_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retaining_heads, "heads_of_package", HEADS_OF_PACKAGE)
    with pytest.raises(OptionError, match=r"millpond train retain --model MODEL --data texts\.jsonl --out"):
        mp.compress(llama(), "locret", 16)


def test_files_are_small_and_have_cards() -> None:
    files = heads_files()
    assert {"pond-recall.safetensors", "pond-recall-gate.safetensors"} <= {file.name for file in files}
    for file in files:
        assert file.stat().st_size <= 2_500_000
        card = file.with_suffix(".md").read_text(encoding="utf-8")
        assert f"`{about_file(file)['model'][:12]}`" in card
        assert f"{file.stat().st_size:,} bytes on disk" in card


def test_the_heads_of_the_package_are_found_by_the_mark() -> None:
    for dtype in ("f32", "bf16"):
        model = load_model("pond-recall", dtype)
        heads = heads_finder(model)(None)
        assert heads is HEADS_OF_PACKAGE(model)
        assert len(heads.layers) == 5


def test_without_millpond_models_there_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    assert [file.name for file in heads_files()] == ["pond-recall-gate.safetensors", "pond-recall.safetensors"]


@needs_pond_text
@pytest.mark.parametrize("name", SEPARATE)
def test_heads_and_gates_of_the_text_models_come_with_them(name: str) -> None:
    model = load_model(name)
    heads, gates = heads_finder(model)(None), gates_finder(model)(None)
    assert heads.model == gates.model == model_mark(model)
    assert len(heads.layers) == len(gates.layers) == 6
    assert gates.facts["start"] == heads.digest
    assert {heads.facts["data"], gates.facts["data"]} == {"texts.jsonl"}
    files = {file.name: file for file in heads_files()}
    folder = installed_folder(name)
    assert folder is not None
    for file in (f"{name}.safetensors", f"{name}-gate.safetensors"):
        assert files[file].parent == folder.parent / "heads"
