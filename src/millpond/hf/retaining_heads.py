"""Retaining heads of a model: those that come with the package, or those of a file, checked against the model."""

from __future__ import annotations

import os

from transformers import PreTrainedModel

from millpond.errors import CacheMismatchError, OptionError
from millpond.hf.calibration.load import model_mark
from millpond.models.installed import heads_files
from millpond.option_files import read_file
from millpond.policy.retaining.file import about_file, heads_of
from millpond.policy.retaining.heads import RetainingHeads
from millpond.policy.scores.retained import FindHeads

#: Heads that come with the package, by their files: read once.
_bundled: dict[str, RetainingHeads] = {}


def heads_finder(model: PreTrainedModel) -> FindHeads:
    """What finds the heads of `model`: given ones if they are its own, else those with its mark in the package.

    Raises (when it is called):
        OptionError: none were given, and none come with the package.
        CacheMismatchError: those given are of another model.
    """

    def find(given: RetainingHeads | None) -> RetainingHeads:
        if given is None:
            return heads_of_package(model)
        if given.model != model_mark(model):
            raise CacheMismatchError(
                f"these retaining heads were trained for another model ({given.name}) than this "
                f"{type(model).__name__}, for other weights, or for the same ones in other numbers of 16 bits: train "
                "this one's with 'millpond train retain'"
            )
        return given

    return find


def heads_of_package(model: PreTrainedModel) -> RetainingHeads:
    """The heads of `model` that come with the package.

    Raises:
        OptionError: there are none.
    """
    mark = model_mark(model)
    for file in heads_files():
        path = os.fspath(file)
        if about_file(path)["model"] == mark:
            if path not in _bundled:
                _bundled[path] = heads_of(read_file(path), path)
            return _bundled[path]
    raise OptionError(
        f"locret needs retaining heads, and none come with the package for this {type(model).__name__}: train them "
        "with 'millpond train retain --model MODEL --data texts.jsonl --out heads.safetensors', and give "
        "heads='heads.safetensors'"
    )
