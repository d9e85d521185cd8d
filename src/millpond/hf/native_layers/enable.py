"""Native decoder layers and linear layers of one model, switched on while it decodes on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from millpond.hf.native_layers.decoder_layers import use_lean_layers
from millpond.hf.native_layers.linears import use_native_linears


def use_native_layers(model: nn.Module) -> Callable[[], None]:
    """Let decoder layers like Llama's pass few rows natively as a whole, and of other layers the linear ones.

    Returns:
        What undoes it, once no other caller needs it.
    """
    undo_linears, undo_layers = use_native_linears(model), use_lean_layers(model)

    def undo() -> None:
        undo_layers()
        undo_linears()

    return undo
