"""How the values of each attention layer reach its output: the last linear map, as one matrix per query head."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from millpond.cache.layer.layer_cache import LayerCache
from millpond.errors import UnsupportedModelError
from millpond.hf.model_support import decoder_modules, text_config

#: What model families call the last linear map of their attention.
NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")


def output_projections(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The last linear map of each attention layer of the decoder, where one is found."""
    return {index: getattr(module, name) for index, (module, name) in _places(model).items()}


def _places(model: PreTrainedModel) -> dict[int, tuple[nn.Module, str]]:
    """Where these are: an attention layer, and their name in it."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for module in decoder_modules(model)[-1].modules():
        index = getattr(module, "layer_idx", None)
        name = next((name for name in NAMES if isinstance(getattr(module, name, None), nn.Module)), None)
        if isinstance(index, int) and name is not None:
            found[index] = module, name
    return found


def attach_output_projections(model: PreTrainedModel, cores: Iterable[LayerCache]) -> None:
    """Let scores see the output maps of their layers: those that are there when a score asks."""
    places, n_heads, name = _places(model), int(text_config(model).num_attention_heads), type(model).__name__

    def maps(index: int) -> Tensor:
        linear = getattr(*places[index], None) if index in places else None
        return output_maps(linear, n_heads, name)

    for core in cores:
        core.attention.outputs = partial(maps, core.index)


@torch.no_grad()
def output_maps(linear: nn.Module | None, n_heads: int, name: str) -> Tensor:
    """(n_heads, value_dim, hidden size), a view of the weights: head h adds o_h @ W_h to the layer's output.

    Raises:
        UnsupportedModelError: there is no such linear map, or its weights are not plain numbers.
    """
    weight: Tensor | None = None
    if isinstance(linear, nn.Linear) and linear.weight.is_floating_point():
        weight = linear.weight.T
    elif isinstance(linear, Conv1D):
        weight = linear.weight
    if weight is not None:
        return weight.view(n_heads, -1, weight.shape[1])
    what = "was not found" if linear is None else f"is a {type(linear).__name__}, whose weights cannot be read"
    raise UnsupportedModelError(
        f"{name}: the output projection of its attention {what}, so values cannot be weighed by it; use the score alone"
    )
