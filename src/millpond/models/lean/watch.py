"""Watch: whether the modules that a pass goes around are still what they were."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Watch:
    """The modules that a pass does not call, and where their weights lie. Asked at every pass, so it is quick.

    Args:
        modules: all of them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._hooks = [hooks for m in self._modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._weights = [
            (m._parameters, name, weight, weight.data_ptr())
            for m in self._modules
            for name, weight in m._parameters.items()
            if weight is not None
        ]

    def unchanged(self) -> bool:
        """Whether nobody looks on, and all weights are in place."""
        return self.quiet() and self.in_place()

    def quiet(self) -> bool:
        """Whether no module has a hook or trains."""
        return not any(self._hooks) and True not in [module.training for module in self._modules]

    def in_place(self) -> bool:
        """Whether no weight was replaced or moved."""
        for parameters, name, weight, address in self._weights:
            if parameters.get(name) is not weight or weight.data_ptr() != address:
                return False
        return True
