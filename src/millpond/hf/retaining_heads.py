"""Trained networks of a model: those that come with the package, or those of a file, checked against the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from transformers import PreTrainedModel

from millpond.errors import CacheMismatchError, OptionError
from millpond.hf.adapter import check_adapter
from millpond.hf.calibration.load import model_mark
from millpond.hf.model_profile import ModelProfile
from millpond.models.installed import heads_files
from millpond.option_files import read_file
from millpond.policy.scores.over_hidden import FindNetworks, OverHidden
from millpond.policy.scores.trained import FindGates, FindHeads
from millpond.policy.trained.file import about_file, gates_of, heads_of
from millpond.policy.trained.hidden_networks import HiddenNetworks
from millpond.policy.trained.kinds import GATE, RETAIN, NetworkKind
from millpond.policy.trained.networks import Gates, RetainingHeads

N = TypeVar("N", RetainingHeads, Gates, HiddenNetworks)

#: Networks that come with the package, by their files: read once.
_bundled_heads: dict[str, RetainingHeads] = {}
_bundled_gates: dict[str, Gates] = {}


def heads_finder(model: PreTrainedModel) -> FindHeads:
    """Return a function that finds the heads of `model`.

    It returns given ones if they are its own, else those with its mark in the package.

    Raises:
        OptionError: none were given, and none come with the package (when it is called).
        CacheMismatchError: those given are of another model (when it is called).
    """
    return lambda heads: heads_of_package(model) if heads is None else _own(model, heads, "retaining heads", RETAIN)


def gates_finder(model: PreTrainedModel) -> FindGates:
    """Return a function that finds the gates of `model`, as `heads_finder` finds its heads.

    An adapter beside them is one of its projections.
    """

    def find(gates: Gates | None) -> Gates:
        found = gates_of_package(model) if gates is None else _own(model, gates, "gates", GATE)
        if found.adapter is not None:
            check_adapter(ModelProfile.of(model), found.adapter)
        return found

    return find


def networks_finder(model: PreTrainedModel) -> FindNetworks:
    """Return a function that finds networks of `model` over hidden states.

    It is as `heads_finder`, which finds its heads.
    """

    def find(score: OverHidden) -> HiddenNetworks:
        kind = next(iter(score.kinds))
        if score.networks is None:
            return networks_of_package(model, kind)
        return _own(model, score.networks, kind.things, kind)

    return find


def networks_of_package(model: PreTrainedModel, kind: NetworkKind) -> HiddenNetworks:
    """Return the networks of `model` over hidden states that come along: so far none.

    Raises:
        OptionError: there are none.
    """
    raise OptionError(
        f"{kind.name.partition('-')[0]} needs {kind.things} over hidden states, and none come with the package for "
        f"this {type(model).__name__}: make a file of them with {kind.command} and give its name ('networks=FILE')"
    )


def heads_of_package(model: PreTrainedModel) -> RetainingHeads:
    """Return the heads of `model` that come with the package.

    Raises:
        OptionError: there are none.
    """
    heads = _in_package(model, RETAIN, heads_of, _bundled_heads)
    if heads is None:
        raise OptionError(
            f"locret needs retaining heads, and none come with the package for this {type(model).__name__}: train them "
            "with 'millpond train retain --model MODEL --data texts.jsonl --out heads.safetensors', and give "
            "heads='heads.safetensors'"
        )
    return heads


def gates_of_package(model: PreTrainedModel) -> Gates:
    """Return the gates of `model` that come with the package.

    Raises:
        OptionError: there are none.
    """
    gates = _in_package(model, GATE, gates_of, _bundled_gates)
    if gates is None:
        raise OptionError(
            f"attention_gate needs gates, and none come with the package for this {type(model).__name__}: train them "
            "with 'millpond train gate --model MODEL --data texts.jsonl --target-keep 10% --out gate.safetensors', and "
            "give gate='gate.safetensors'"
        )
    return gates


def _in_package(
    model: PreTrainedModel, kind: NetworkKind, read: Callable[[bytes, str], N], networks_by_path: dict[str, N]
) -> N | None:
    """Return the networks of a kind with the mark of `model`; None if there are none."""
    mark = model_mark(model)
    for file in heads_files():
        path = os.fspath(file)
        facts = about_file(path)
        if (facts["kind"], facts["model"]) == (kind.name, mark):
            if path not in networks_by_path:
                networks_by_path[path] = read(read_file(path), path)
            return networks_by_path[path]
    return None


def _own(model: PreTrainedModel, networks: N, things: str, kind: NetworkKind) -> N:
    """Return the given networks if they are this model's.

    Raises:
        CacheMismatchError: they are not.
    """
    if networks.model != model_mark(model):
        raise CacheMismatchError(
            f"these {things} were trained for another model ({networks.name}) than this {type(model).__name__}, for "
            f"other weights, or for the same ones in other numbers of 16 bits: train this one's with {kind.command}"
        )
    return networks
