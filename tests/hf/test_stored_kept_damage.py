"""Coded texts of which something was evicted, damaged or made up: refused by the rule that they break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from millpond.cache.coded.kept import n_coded
from millpond.errors import DataError
from millpond.hf.document import checksum
from tests.helpers.hf.kept import BUDGET, restored, store

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # budgets of few entries


def spoil(path: Path, change: Any) -> None:
    """Change tensors of a document, with a checksum of the file that fits."""
    with safe_open(path, "pt") as file:
        facts = dict(file.metadata())
    tensors = load_file(path)
    change(tensors)
    facts["checksum"] = checksum({name: fact for name, fact in facts.items() if name != "checksum"}, tensors)
    save_file(tensors, path, facts)


def put(name: str, at: Any, value: int) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][at] = value

    return change


def cut(name: str, n: int) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:n].clone()

    return change


def flip(tensors: dict[str, Tensor]) -> None:
    tensors["1.codes.pages"][100] ^= 4


def heads_swapped(tensors: dict[str, Tensor]) -> None:
    first, second = tensors["0.codes.pages"][:-16], tensors["0.codes.pages"][-16:]
    tensors["0.codes.pages"] = torch.cat([second, first])


def as_one(tensors: dict[str, Tensor]) -> None:
    tensors["0.positions"] = tensors["0.positions"][:1].clone()


def as_floats(tensors: dict[str, Tensor]) -> None:
    tensors["0.positions"] = tensors["0.positions"].float()


def unordered(tensors: dict[str, Tensor]) -> None:
    tensors["0.exact.at"] = tensors["0.exact.at"].flip(0)


def behind_pages(tensors: dict[str, Tensor]) -> None:
    tensors["0.exact.at"][3] = n_coded(BUDGET)


def endless(tensors: dict[str, Tensor]) -> None:
    tensors["0.lens"] = torch.full((2,), 2_000_000_000, dtype=torch.int32)


def missing(tensors: dict[str, Tensor]) -> None:
    del tensors["1.codes.headers"]


HOSTILE = {
    "a flipped bit": (flip, "damaged"),
    "moved pages": (heads_swapped, "another text or place|damaged"),
    "a position too far": (put("0.positions", (0, 5), 400), "positions are -1 to 399"),
    "no position": (put("0.positions", (0, 5), -1), "as many positions as entries"),
    "a token twice": (put("0.positions", (0, slice(5, 7)), 9), "a token once"),
    "positions of one head": (as_one, "parts for what its heads hold"),
    "positions with a point": (as_floats, "whole numbers"),
    "more entries than slots": (put("0.lens", 0, 241), "as many entries as slots"),
    "less than no entry": (put("0.lens", 0, -1), "as many entries as slots"),
    "endless": (endless, "as many entries as slots"),
    "fewer entries": (put("0.lens", 0, 239), "as many positions as entries"),
    "fewer pages": (cut("0.codes.pages", -32), "pages have"),
    "fewer headers": (cut("0.codes.headers", -1), "headers have"),
    "no header": (put("0.codes.fitted", 1, 0), "headers have"),
    "half a header": (put("0.codes.fitted", 1, 2), "a header of its own or not"),
    "wide bits": (put("0.codes.headers", slice(-2, None), 0x77), "pages have"),
    "other parts": (cut("0.codes.fitted", 1), "parts for what its heads hold"),
    "exact before the text": (put("0.exact.at", 0, -3), "some of the text"),
    "exact out of order": (unordered, "ascend"),
    "exact behind the pages": (behind_pages, "are in pages|ascend"),
    "fewer exact": (cut("0.exact.keys", 9), "has keys and values"),
    "a part missing": (missing, "lacks 'codes.headers'"),
    "no lengths": (lambda tensors: tensors.pop("0.lens"), "lacks 'lens'"),
    "scores of others": (cut("0.scores", 1), "each entry has a score"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_files_are_refused(name: str, tmp_path: Path) -> None:
    change, rule = HOSTILE[name]
    store("h2o", tmp_path / "text")
    spoil(tmp_path / "text", change)
    with pytest.raises(DataError, match=rule):
        restored(tmp_path / "text")


@pytest.mark.parametrize("storage", ["zip", "transform:9"])
def test_codecs_that_there_are_not(storage: str, tmp_path: Path) -> None:
    store("h2o", tmp_path / "text")
    with safe_open(tmp_path / "text", "pt") as file:
        facts = dict(file.metadata()) | {"storage": storage}
    tensors = load_file(tmp_path / "text")
    facts["checksum"] = checksum({name: fact for name, fact in facts.items() if name != "checksum"}, tensors)
    save_file(tensors, tmp_path / "text", facts)
    with pytest.raises(DataError, match="a codec that there is not"):
        restored(tmp_path / "text")
