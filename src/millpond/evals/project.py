"""The output projection of each attention layer, as a matrix for each query head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.errors import UnsupportedModelError
from millpond.hf.support import text_config

#: What model families call the last linear map of their attention.
NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")


def output_matrices(model: PreTrainedModel) -> dict[int, Tensor]:
    """{layer: (H, value_dim, hidden size)}, so that head h adds o_h @ W_h to the layer's output.

    Raises:
        UnsupportedModelError: the projection of some layer is not found.
    """
    found = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        linear = next((part for name in NAMES if isinstance(part := getattr(module, name, None), nn.Module)), None)
        if isinstance(index, int) and linear is not None:
            found[index] = _by_head(linear, int(text_config(model).num_attention_heads))
    count = int(text_config(model).num_hidden_layers)
    if sorted(found) != list(range(count)):
        raise UnsupportedModelError(
            f"{type(model).__name__}: the output projection was found in {len(found)} of {count} attention layers "
            f"(looked for {', '.join(NAMES)}), so their losses cannot be told"
        )
    return found


@torch.no_grad()
def _by_head(linear: nn.Module, n_heads: int) -> Tensor:
    """The map applied to unit vectors: right for every kind of linear layer, however it keeps its weights."""
    weight = next(p for p in linear.parameters() if p.ndim == 2)
    size = int(getattr(linear, "in_features", weight.shape[0]))
    units = torch.eye(size, dtype=weight.dtype, device=weight.device)
    matrix: Tensor = linear(units) - linear(torch.zeros_like(units[:1]))
    return matrix.view(n_heads, size // n_heads, -1)
