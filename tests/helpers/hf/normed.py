"""What the attention modules of a model read, by hooks of the tests' own."""

from typing import Any

import torch
from torch import Tensor


def attention_inputs(model: Any, ids: Tensor) -> list[Tensor]:
    """(n, width) of each layer: the output of the norm before its attention, of the first text."""
    found: list[Tensor] = []
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda *a: found.append(a[2][0].detach()))
        for layer in model.model.layers
    ]
    try:
        with torch.no_grad():
            model(ids)
        return found
    finally:
        for hook in hooks:
            hook.remove()
