"""Trained networks of a model: those that come with the package, or those of a file, checked against the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from transformers import PreTrainedModel

from millpond.errors import CacheMismatchError, OptionError
from millpond.hf.calibration.load import model_mark
from millpond.models.installed import heads_files
from millpond.option_files import read_file
from millpond.policy.scores.trained import FindGates, FindHeads
from millpond.policy.trained.file import GATE, RETAIN, NetworkKind, about_file, gates_of, heads_of
from millpond.policy.trained.networks import Gates, RetainingHeads

N = TypeVar("N", RetainingHeads, Gates)

#: Networks that come with the package, by their files: read once.
_bundled_heads: dict[str, RetainingHeads] = {}
_bundled_gates: dict[str, Gates] = {}


def heads_finder(model: PreTrainedModel) -> FindHeads:
    """What finds the heads of `model`: given ones if they are its own, else those with its mark in the package.

    Raises (when it is called):
        OptionError: none were given, and none come with the package.
        CacheMismatchError: those given are of another model.
    """
    return lambda given: heads_of_package(model) if given is None else _own(model, given, "retaining heads", RETAIN)


def gates_finder(model: PreTrainedModel) -> FindGates:
    """What finds the gates of `model`, as `heads_finder` finds its heads."""
    return lambda given: gates_of_package(model) if given is None else _own(model, given, "gates", GATE)


def heads_of_package(model: PreTrainedModel) -> RetainingHeads:
    """Return the heads of `model` that come with the package.

    Raises:
        OptionError: there are none.
    """
    found = _in_package(model, RETAIN, heads_of, _bundled_heads)
    if found is None:
        raise OptionError(
            f"locret needs retaining heads, and none come with the package for this {type(model).__name__}: train them "
            "with 'millpond train retain --model MODEL --data texts.jsonl --out heads.safetensors', and give "
            "heads='heads.safetensors'"
        )
    return found


def gates_of_package(model: PreTrainedModel) -> Gates:
    """Return the gates of `model` that come with the package.

    Raises:
        OptionError: there are none.
    """
    found = _in_package(model, GATE, gates_of, _bundled_gates)
    if found is None:
        raise OptionError(
            f"attention_gate needs gates, and none come with the package for this {type(model).__name__}: train them "
            "with 'millpond train gate --model MODEL --data texts.jsonl --target-keep 10% --out gate.safetensors', and "
            "give gate='gate.safetensors'"
        )
    return found


def _in_package(
    model: PreTrainedModel, kind: NetworkKind, read: Callable[[bytes, str], N], known: dict[str, N]
) -> N | None:
    """Return the networks of a kind with the mark of `model`; None where there are none."""
    mark = model_mark(model)
    for file in heads_files():
        path = os.fspath(file)
        about = about_file(path)
        if (about["kind"], about["model"]) == (kind.name, mark):
            if path not in known:
                known[path] = read(read_file(path), path)
            return known[path]
    return None


def _own(model: PreTrainedModel, given: N, things: str, kind: NetworkKind) -> N:
    """Return the networks that were given, if they are this model's.

    Raises:
        CacheMismatchError: they are not.
    """
    if given.model != model_mark(model):
        raise CacheMismatchError(
            f"these {things} were trained for another model ({given.name}) than this {type(model).__name__}, for other "
            f"weights, or for the same ones in other numbers of 16 bits: train this one's with {kind.command}"
        )
    return given
