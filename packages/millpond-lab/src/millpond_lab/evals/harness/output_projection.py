"""The output projection of each attention layer, as a matrix for each query head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.errors import UnsupportedModelError
from millpond.hf.model_profile import PROJECTIONS, ModelProfile


def output_matrices(model: PreTrainedModel) -> dict[int, Tensor]:
    """{layer: (H, value_dim, hidden size)}, so that head h adds o_h @ W_h to the layer's output.

    Raises:
        UnsupportedModelError: the projection of some layer is not found.
    """
    profile = ModelProfile.of(model)
    places = profile.output_projections.items()
    found = {index: _by_head(getattr(place.module, place.name), profile.n_heads) for index, place in places}
    count = profile.n_layers
    if sorted(found) != list(range(count)):
        raise UnsupportedModelError(
            f"{type(model).__name__}: the output projection was found in {len(found)} of {count} attention layers "
            f"(looked for {', '.join(PROJECTIONS)}), so their losses cannot be computed"
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
