"""Watch: whether the modules that a pass goes around are still what they were."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_

from torch import nn


class Watch:
    """The modules that a pass does not call, and where their weights lie. Asked at every pass, so it is quick.

    Args:
        modules: all of them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._hooks = [hooks for m in self._modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        held = [(m._parameters, name, w) for m in self._modules for name, w in m._parameters.items() if w is not None]
        self._places = [(parameters, name) for parameters, name, _ in held]
        self._weights = [weight for _, _, weight in held]
        self._addresses = [weight.data_ptr() for weight in self._weights]

    def unchanged(self) -> bool:
        """Whether nobody looks on, and all weights are in place."""
        return self.quiet() and self.in_place()

    def quiet(self) -> bool:
        """Whether no module has a hook or trains."""
        return not any(self._hooks) and True not in [module.training for module in self._modules]

    def in_place(self) -> bool:
        """Whether no weight was replaced or moved."""
        found = [parameters.get(name) for parameters, name in self._places]
        return all(map(is_, found, self._weights)) and [w.data_ptr() for w in self._weights] == self._addresses
