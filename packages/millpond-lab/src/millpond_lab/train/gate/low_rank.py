"""Low-rank adapters in training: matrices of each attention layer's projections, beside its gate (LoRA)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from millpond.errors import UnsupportedModelError
from millpond.hf.adapter import projections_of
from millpond.hf.model_profile import ModelProfile
from millpond.policy.trained.adapter import LowRank

#: Numbers of inputs and outputs of each projection of one layer.
Sizes = dict[str, tuple[int, int]]


def projection_sizes(profile: ModelProfile) -> list[Sizes]:
    """Inputs and outputs of the projections of every attention layer, by name.

    Raises:
        UnsupportedModelError: a layer without linear maps.
    """
    layers = projections_of(profile)
    if not all(layers):
        raise UnsupportedModelError(
            f"{profile.name} has attention layers whose projections are no linear maps, to which an adapter could add; "
            "leave --lora out"
        )
    return [{name: (linear.in_features, linear.out_features) for name, linear in layer.items()} for layer in layers]


class TrainedAdapter(nn.Module):
    """The adapter of one layer while it is trained: y = W x + B A x, with B = 0 at first.

    Args:
        sizes: of its projections. rank: of all of them.
    """

    def __init__(self, sizes: Sizes, rank: int) -> None:
        super().__init__()
        self.a = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(rank, n).uniform_(-1, 1) / n**0.5) for name, (n, _) in sizes.items()}
        )
        self.b = nn.ParameterDict({name: nn.Parameter(torch.zeros(n, rank)) for name, (_, n) in sizes.items()})

    @torch.no_grad()
    def continue_from(self, layer: Mapping[str, LowRank]) -> None:
        """Begin with the numbers of an adapter of the same projections and rank."""
        for name, one in layer.items():
            _part(self.a[name]).copy_(one.a)
            _part(self.b[name]).copy_(one.b)

    @property
    def added(self) -> Mapping[str, LowRank]:
        """What it adds now, by projection."""
        return {name: LowRank(_part(self.a[name]), _part(self.b[name])) for name in self.a}

    def as_stored(self) -> Mapping[str, LowRank]:
        """The same in the numbers of a file, without gradients."""
        return {name: one.map(lambda part: part.detach().bfloat16().float()) for name, one in self.added.items()}


def _part(part: object) -> Tensor:
    assert isinstance(part, Tensor), "a matrix"
    return part
