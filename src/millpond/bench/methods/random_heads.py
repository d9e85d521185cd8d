"""Retaining heads with random weights, for models that nobody trained: they cost what trained ones cost."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from millpond.hf.calibration.load import model_mark
from millpond.hf.model_profile import ModelProfile, named
from millpond.policy.retaining.heads import QUANTILE_STEPS, LayerHeads, RetainingHeads, default_width


def random_heads(model: PreTrainedModel, seed: int = 0) -> RetainingHeads:
    """Heads of a model whose layers are alike, as wide as trained ones: the same at each call."""
    profile = ModelProfile.of(model)
    config = profile.config
    n_heads = profile.n_heads or 1
    n_kv_heads = int(named(config, "num_key_value_heads") or n_heads)
    head_dim = int(named(config, "head_dim") or config.hidden_size // n_heads)
    width = default_width(int(config.hidden_size), n_kv_heads * head_dim)
    inputs = (n_heads + 2 * n_kv_heads) * head_dim
    draw = torch.Generator().manual_seed(seed)

    def layer() -> LayerHeads:
        w1, w2 = (torch.randn(*shape, generator=draw) for shape in ((width, inputs), (n_kv_heads, width)))
        quantiles = torch.linspace(-3, 3, QUANTILE_STEPS + 1).repeat(n_kv_heads, 1)
        return LayerHeads(
            w1 / inputs**0.5, torch.zeros(width), w2 / width**0.5, torch.zeros(n_kv_heads), quantiles
        )  # fmt: skip

    return RetainingHeads([layer() for _ in range(profile.n_layers)], model_mark(model), profile.name)
