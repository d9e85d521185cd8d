"""Output projection of each attention layer, as one matrix per query head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from millpond.cache.layer.layer_cache import LayerCache
from millpond.errors import UnsupportedModelError
from millpond.hf.model_profile import ModelProfile, OutputProjection


def attach_output_projections(profile: ModelProfile, layer_caches: Iterable[LayerCache]) -> None:
    """Attach the output projections of the layers, looked up when a score reads them.

    They hold no profile, which would keep the model in memory.
    """
    projections, n_heads, name = profile.output_projections, profile.n_heads, profile.name
    for layer_cache in layer_caches:
        layer_cache.attention.outputs = partial(_maps, projections, n_heads, name, layer_cache.index)


def check_output_projections(profile: ModelProfile) -> None:
    """Check that every attention layer has an output projection that can be read.

    Raises:
        UnsupportedModelError: see `output_maps`.
    """
    for layer in range(profile.n_layers):
        layer_output_maps(profile, layer)


def layer_output_maps(profile: ModelProfile, layer: int) -> Tensor:
    """Return the output projection of an attention layer, see `output_maps`.

    Raises:
        UnsupportedModelError: see there.
    """
    return _maps(profile.output_projections, profile.n_heads, profile.name, layer)


def _maps(projections: Mapping[int, OutputProjection], n_heads: int, name: str, layer: int) -> Tensor:
    projection = projections.get(layer)
    linear = None if projection is None else getattr(projection.module, projection.name, None)
    return output_maps(linear, n_heads, name)


@torch.no_grad()
def output_maps(linear: nn.Module | None, n_heads: int, name: str) -> Tensor:
    """Return an output projection as one matrix per query head, a view of the weights.

    Args:
        linear: Linear map; None if there is none.
        n_heads: Query heads.
        name: Name of the model, for messages.

    Returns:
        (n_heads, value_dim, hidden size): head h adds o_h @ W_h to the layer's output.

    Raises:
        UnsupportedModelError: there is no such linear map, or its weights are not plain numbers.
    """
    weight: Tensor | None = None
    if isinstance(linear, nn.Linear) and linear.weight.is_floating_point():
        weight = linear.weight.T
    elif isinstance(linear, Conv1D):
        weight = linear.weight
    if weight is not None and weight.is_meta:
        raise UnsupportedModelError(
            f"{name}: its weights are read layer by layer, so no plan weighs values by the output "
            "projections; give more memory=, or use another method"
        )
    if weight is not None and n_heads:
        return weight.view(n_heads, -1, weight.shape[1])
    if not n_heads:
        raise UnsupportedModelError(
            f"{name}: its layers differ in their query heads, so no score weighs values by them"
        )
    reason = "was not found" if linear is None else f"is a {type(linear).__name__}, whose weights cannot be read"
    raise UnsupportedModelError(
        f"{name}: the output projection of its attention {reason}, so values cannot be weighed by it; use the score "
        "alone"
    )
