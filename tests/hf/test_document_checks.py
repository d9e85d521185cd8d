"""A document is read back as it was written, or refused with a reason: nothing of it is used before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import millpond as mp
from millpond.errors import DataError
from millpond.hf.document import checksum, read_document, restore_document, save_document
from tests.helpers.matrix.models import llama
from tests.hf.test_document import wide

IDS = torch.randint(2, 96, (1, 300), generator=torch.Generator().manual_seed(4))
Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]


def with_(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


#: What no layer gives, with a checksum that fits: a file that somebody made.
MADE: dict[str, Change] = {
    "no values": lambda t: {name: one for name, one in t.items() if name != "1.values"},
    "fewer values": with_("0.values", lambda t: t[:, :-1]),
    "keys of another rank": with_("0.keys", lambda t: t.flatten(1)),
    "keys that are whole": with_("0.keys", lambda t: t.int()),
    "positions of other heads": with_("0.positions", lambda t: t[:1]),
    "positions behind the text": with_("0.positions", lambda t: t + 10**6),
    "scores in half": with_("0.scores", lambda t: t.half()),
    "more than there is": with_("0.lens", lambda t: t + 1000),
    "less than nothing": with_("0.lens", lambda t: t - 1000),
    "one cap": with_("0.capacities", lambda t: t[:1]),
    "no number": with_("0.shape", lambda t: t * float("nan")),
}
PAGES: dict[str, Change] = {
    "pages of another codec": with_("0.sealed.pages.0", lambda t: t.flatten(1)[:, :-1]),
    "too few pages": with_("0.sealed.pages.0", lambda t: t[1:]),
    "pages that are not there": with_("0.sealed.owned", lambda t: t + 50),
    "more dead than alive": with_("0.sealed.dead", lambda t: t + 10**6),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    folder, found = tmp_path_factory.mktemp("documents"), {}
    for codec, model in (("auto", llama("gqa", torch.float32)), ("int8", wide())):
        with torch.no_grad(), mp.compress(model, "snapkv", 200, codec) as cache:
            read_document(model, cache, IDS)
            save_document(cache, IDS, folder / codec)
        found[codec] = (model, folder / codec)
    return found


def changed(path: Path, to: Path, change: Change, *, signed: bool) -> Path:
    with safe_open(path, "pt") as file:
        about = file.metadata()
    tensors = change(load_file(path))
    save_file(tensors, to, about | ({"checksum": checksum(about, tensors)} if signed else {}))
    return to


@pytest.mark.parametrize(("codec", "name"), [*(("auto", n) for n in MADE), *(("int8", n) for n in PAGES)])
def test_what_somebody_made_is_refused(written: dict[str, Any], codec: str, name: str, tmp_path: Path) -> None:
    model, path = written[codec]
    before = model.config._attn_implementation
    with pytest.raises(DataError, match=r"layer \d"):
        restore_document(model, changed(path, tmp_path / "x", (MADE | PAGES)[name], signed=True))
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("side", ["keys", "values"])
def test_what_a_gate_has_read_is_finite(side: str, tmp_path: Path) -> None:
    model = llama("gqa", torch.float32)
    with torch.no_grad(), mp.compress(model, "attention_gate", 100) as cache:
        read_document(model, cache, IDS)
        save_document(cache, IDS, tmp_path / "text")
    change = with_(f"0.gate.{side}", lambda t: t.index_fill(0, torch.tensor([7]), float("inf")))
    with pytest.raises(DataError, match="what a gate has read is finite"):
        restore_document(model, changed(tmp_path / "text", tmp_path / "x", change, signed=True))


def test_a_changed_number_is_told(written: dict[str, Any], tmp_path: Path) -> None:
    model, path = written["auto"]
    for change in (with_("0.keys", lambda t: t * 2), lambda t: t | {"0.keys": t["1.keys"], "1.keys": t["0.keys"]}):
        with pytest.raises(DataError, match="checksum"):
            restore_document(model, changed(path, tmp_path / "x", change, signed=False))
    with safe_open(path, "pt") as file:
        about = file.metadata()
    settings = json.dumps({**json.loads(about["settings"]), "method": "h2o"})
    save_file(load_file(path), tmp_path / "y", about | {"settings": settings})
    with pytest.raises(DataError, match="checksum"):
        restore_document(model, tmp_path / "y")


def test_every_flipped_byte_is_told(written: dict[str, Any], tmp_path: Path) -> None:
    model, path = written["auto"]
    whole, other = path.read_bytes(), tmp_path / "flipped"
    for at in range(0, len(whole), len(whole) // 97):
        other.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(DataError):
            restore_document(model, other)


@pytest.mark.parametrize("codec", ["rotated4", "flexgen4"])
def test_a_file_from_before_pages_held_means_goes_on_in_its_own_layout(codec: str, tmp_path: Path) -> None:
    """Then `rotated4` was what `rotated4_paper` is now."""
    model, question = wide(), torch.tensor([[5, 9, 11]])
    with torch.no_grad(), mp.compress(model, "full", codec=f"{codec}_paper") as cache:
        read_document(model, cache, IDS)
        save_document(cache, IDS, tmp_path / "text")
        expected = model(question, cache=cache).logits
    with safe_open(tmp_path / "text", "pt") as file:
        about = dict(file.metadata() or {})
    about |= {"format": "millpond-document-2", "settings": about["settings"].replace("_paper", "")}
    tensors = load_file(tmp_path / "text")
    about["checksum"] = checksum(about, tensors)
    save_file(tensors, tmp_path / "old", about)
    cache, _ = restore_document(model, tmp_path / "old")
    with torch.no_grad(), cache:
        assert cache.settings is not None
        assert cache.settings["codec"] == f"{codec}_paper"
        assert torch.equal(model(question, cache=cache).logits, expected)
