"""Forward hooks that transformers puts on a model where hidden states are asked for, and leaves there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

#: By this transformers knows a model that has its hooks.
_INSTALLED = "_output_capturing_hooks_installed"


@contextmanager
def removed_afterwards(model: nn.Module) -> Iterator[None]:
    """Remove the forward hooks that modules of a model get inside.

    Models with hooks do not run without their modules: no native layers, and no deterministic engine.
    """
    before = [(module, set(module._forward_hooks), hasattr(module, _INSTALLED)) for module in model.modules()]
    try:
        yield
    finally:
        for module, hooks, installed in before:
            for name in set(module._forward_hooks) - hooks:
                del module._forward_hooks[name]
            if not installed and hasattr(module, _INSTALLED):
                delattr(module, _INSTALLED)
