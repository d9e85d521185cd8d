"""Low-rank adapter of a model's attention projections, trained beside its gates (LoRA, Hu et al., arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class LowRank(NamedTuple):
    """What is added to a linear map: y = W x + B A x.

    Attributes:
        a: (rank, inputs).
        b: (outputs, rank).
    """

    a: Tensor
    b: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return what is added to the outputs of x (..., inputs): (..., outputs), in the dtype of `a`."""
        return F.linear(F.linear(x.to(self.a.dtype), self.a), self.b)

    def map(self, change: Callable[[Tensor], Tensor]) -> LowRank:
        """Return the same with both matrices changed."""
        return LowRank(change(self.a), change(self.b))


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Additions to the projections of every attention layer.

    Attributes:
        layers: Additions by the name of the projection, such as q_proj, one mapping per attention layer.
    """

    layers: Sequence[Mapping[str, LowRank]]

    @property
    def rank(self) -> int:
        """Rank of the additions, the same for all."""
        return len(next(iter(self.layers[0].values())).a)

    def parts(self) -> list[tuple[str, Tensor]]:
        """Return its matrices, named as in a file: layer, projection, and a or b."""
        return [
            (f"{index}.lora.{name}.{part}", matrix)
            for index, layer in enumerate(self.layers)
            for name in sorted(layer)
            for part, matrix in zip("ab", layer[name], strict=True)
        ]
