"""Watch: whether the modules that a pass goes around are still what they were."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from millpond.kernels.dense import Matrices


class Watch:
    """The modules that a pass does not call, and the weights that it took from them.

    Args:
        modules: all of them. fused: matrices whose parts are views of a whole.
    """

    def __init__(self, modules: Iterable[nn.Module], fused: Iterable[Matrices]) -> None:
        self._modules = list(modules)
        self._weights = [(m, name, w) for m in self._modules for name, w in m._parameters.items()]
        self._views = [
            (view, view.data_ptr())
            for matrices in fused
            if matrices.whole is not None
            for part in matrices.parts
            for view in part
            if view is not None
        ]

    def unchanged(self) -> bool:
        """Whether no module has a hook or trains, and no weight was replaced or moved."""
        return (
            not any(m._forward_hooks or m._forward_pre_hooks or m.training for m in self._modules)
            and all(m._parameters.get(name) is weight for m, name, weight in self._weights)
            and all(view.data_ptr() == address for view, address in self._views)
        )
