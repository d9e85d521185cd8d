"""Inputs of a model's attention modules, the normed hidden states, for scores that read them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from millpond.errors import UnsupportedModelError
from millpond.hf.model_profile import ModelProfile


class AttentionInputs:
    """Hooks that hold what each attention module of a running pass reads, until `take`.

    Modules with hooks run as they are, so no native layer bypasses them.

    Args:
        profile: Profile of the model.
        running: Whether this thread runs a pass whose inputs are asked for.

    Raises:
        UnsupportedModelError: the attention module of a layer was not found.
    """

    def __init__(self, profile: ModelProfile, running: Callable[[], bool] = lambda: True) -> None:
        self._running, self._name = running, profile.name
        self._held = threading.local()
        found = [profile.output_projections.get(layer) for layer in range(profile.n_layers)]
        modules = [None if projection is None else projection.module for projection in found]
        if not modules or None in modules:
            layer = modules.index(None) if modules else 0
            raise UnsupportedModelError(
                f"{profile.name}: the attention module of layer {layer} was not found, and this method scores entries "
                "by what it reads; use a method that reads queries, keys and values, such as locret"
            )
        self._hooks = [
            module.register_forward_pre_hook(self._holding(layer), with_kwargs=True)
            for layer, module in enumerate(modules)
            if module is not None
        ]

    def take(self, layer: int) -> Tensor:
        """Return what the attention module of a layer read in this pass, (B, Q, width), once.

        Raises:
            UnsupportedModelError: the pass went around that module.
        """
        hidden: Tensor | None = vars(self._held).pop(f"layer_{layer}", None)
        if hidden is None:
            raise UnsupportedModelError(
                f"{self._name}: layer {layer} attended without its attention module, whose input this method reads; "
                "give native_layers=False, or a model that was not compiled"
            )
        return hidden

    def close(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def _holding(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        """Return the hook of one layer."""

        def hold(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if isinstance(hidden, Tensor) and self._running():
                setattr(self._held, f"layer_{layer}", hidden.detach())

        return hold
