"""Random retaining heads and gates for models that nobody trained, in place of those that come with the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from transformers import PreTrainedModel

from millpond.errors import OptionError
from millpond.hf import retaining_heads
from millpond.policy.trained.hidden_networks import HiddenNetworks
from millpond.policy.trained.kinds import NetworkKind
from millpond.policy.trained.networks import Gates, RetainingHeads
from millpond_lab.bench.methods.candidate import RANDOM_KINDS, random_gates, random_heads, random_networks
from millpond_lab.train.retain.features import TextReader

#: Families whose heads all have keys of their own, whatever number of KV heads tiny configurations name.
MULTI_HEAD = ("opt", "gpt_neox", "gpt2")
#: As it is: for tests of models that have none.
HEADS_OF_PACKAGE: Callable[[PreTrainedModel], RetainingHeads] = retaining_heads.heads_of_package
GATES_OF_PACKAGE: Callable[[PreTrainedModel], Gates] = retaining_heads.gates_of_package
NETWORKS_OF_PACKAGE = retaining_heads.networks_of_package


def heads_for(model: PreTrainedModel) -> RetainingHeads:
    """Those of the package; random ones where it has none for this model."""
    try:
        return HEADS_OF_PACKAGE(model)
    except OptionError:
        return random_heads(model, _sizes(model))


def gates_for(model: PreTrainedModel) -> Gates:
    """As `heads_for`."""
    try:
        return GATES_OF_PACKAGE(model)
    except OptionError:
        return random_gates(model, _sizes(model))


def networks_for(model: PreTrainedModel, kind: NetworkKind) -> HiddenNetworks:
    """As `heads_for`, over hidden states."""
    sizes = _sizes(model)
    width = int(model.config.get_text_config().hidden_size)
    own = None if sizes is None else [(width, n_kv_heads) for _, n_kv_heads in sizes]
    return random_networks(model, RANDOM_KINDS[kind.name], own)


def _sizes(model: PreTrainedModel) -> list[tuple[int, int]] | None:
    if model.config.model_type not in MULTI_HEAD:
        return None
    return [(size.inputs, size.n_kv_heads) for size in TextReader(model).sizes()]


@contextmanager
def random_heads_where_none_are() -> Iterator[None]:
    """Inside it every model has heads and gates, so that these methods go through the tests of all methods."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retaining_heads, "heads_of_package", heads_for)
        patch.setattr(retaining_heads, "gates_of_package", gates_for)
        patch.setattr(retaining_heads, "networks_of_package", networks_for)
        yield
