"""Temporary replacement of the forward of a model's modules, until its last user is gone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import nn

from millpond.models.lean.watch import mark_the_same


class ForwardOverride:
    """Replacement of `forward` on modules, not on their class: hooks and the state dict stay.

    Args:
        forward: Function that takes the module first. Its name must be `forward`, so that a pickled module is loaded
            with its own.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        mark_the_same(forward)
        self._forward = forward
        self._users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        # held by finalizers too, which may run in the thread that holds it
        self._lock = threading.RLock()

    def serves(self, module: nn.Module) -> bool:
        """Whether it replaces this module's forward now."""
        return getattr(module.__dict__.get("forward"), "__func__", None) is self._forward

    def begin(self, modules: Iterable[nn.Module]) -> Callable[[], None]:
        """Replace the forward of these modules.

        Returns:
            Function that ends it, once no other caller needs it. It keeps no module alive.
        """
        served = []
        with self._lock:
            for module in modules:
                self._users[module] = self._users.get(module, 0) + 1
                if not self.serves(module):
                    module.forward = MethodType(self._forward, module)
                served.append(weakref.ref(module))

        def end() -> None:
            with self._lock:
                for module in filter(None, (reference() for reference in served)):
                    users = self._users.pop(module, 0)
                    if users > 1:
                        self._users[module] = users - 1
                    elif self.serves(module):
                        del module.forward
                served.clear()

        return end
