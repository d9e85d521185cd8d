"""One decoding step of all layers of a cache, whose attention runs between its begin and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from torch import Tensor

from millpond.cache.layer.decode_step import PendingStep
from millpond.cache.layer.layer_cache import LayerCache
from millpond.codec.basis import Basis
from millpond.kernels.args import AttentionShape, StepRegions


class FusedSteps(NamedTuple):
    """A decoding step of all layers."""

    layer_caches: Sequence[LayerCache]
    newest: list[PendingStep]

    @classmethod
    def begin(
        cls, layer_caches: Sequence[LayerCache], n_seq: int, shapes: Sequence[AttentionShape], changes_basis: bool
    ) -> Self | None:
        """Begin a step with one new token of every sequence, none a pad.

        Return None unless all layers are fusable.

        Args:
            layer_caches: Caches of the layers.
            n_seq: Sequences of the step.
            shapes: Shape of each layer's attention.
            changes_basis: Whether the caller minds `bases`.

        Raises:
            PoolFullError: see `LayerCache.begin_step`.
        """
        if not all(
            layer_cache.is_fusable(n_seq, shape, changes_basis)
            for layer_cache, shape in zip(layer_caches, shapes, strict=True)
        ):
            return None
        return cls(
            layer_caches,
            [layer_cache.begin_step(n_seq, shape) for layer_cache, shape in zip(layer_caches, shapes, strict=True)],
        )

    def regions(self) -> list[StepRegions]:
        """Return the entries that each layer attends to."""
        return [step.regions() for step in self.newest]

    def bases(self) -> list[Basis | None]:
        """Return the basis in which each layer stores its numbers; None: as the model makes them."""
        return [step.table.basis for step in self.newest]

    def end(self, lse: Tensor) -> None:
        """Take note of what happened; `lse`: (layers, S, Hq)."""
        together = lse.device.type != "cpu"
        if together:
            self.layer_caches[0].check_layers(lse)
        for layer_cache, step, sums in zip(
            self.layer_caches, self.newest, [None] * len(lse) if together else lse, strict=True
        ):
            layer_cache.end_step(step, sums)
