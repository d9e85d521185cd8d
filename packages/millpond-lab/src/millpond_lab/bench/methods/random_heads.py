"""Retaining heads and gates with random weights, for models with random weights: they cost what trained ones cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from millpond.hf.calibration.load import model_mark
from millpond.hf.model_profile import ModelProfile, named
from millpond.policy.trained.networks import (
    QUANTILE_STEPS,
    Gates,
    LayerGate,
    LayerHeads,
    RetainingHeads,
    default_shape,
    default_width,
)


def random_heads(
    model: PreTrainedModel, sizes: Sequence[tuple[int, int]] | None = None, seed: int = 0
) -> RetainingHeads:
    """Heads of a model, as wide as trained ones: the same at each call.

    sizes: of each layer, the numbers that a token gives and the KV heads; None: as the configuration says.
    """
    profile = ModelProfile.of(model)
    sizes, width = _shapes(profile, sizes)
    draw = torch.Generator().manual_seed(seed)

    def layer(inputs: int, n_scored: int) -> LayerHeads:
        w1, w2 = (torch.randn(*shape, generator=draw) for shape in ((width, inputs), (n_scored, width)))
        quantiles = torch.linspace(-3, 3, QUANTILE_STEPS + 1).repeat(n_scored, 1)
        return LayerHeads(w1 / inputs**0.5, torch.zeros(width), w2 / width**0.5, torch.zeros(n_scored), quantiles)

    return RetainingHeads([layer(*size) for size in sizes], model_mark(model), profile.name)


def random_gates(model: PreTrainedModel, sizes: Sequence[tuple[int, int]] | None = None, seed: int = 0) -> Gates:
    """Gates of a model, as wide as trained ones, that flag about half of the tokens; arguments as of `random_heads`."""
    profile = ModelProfile.of(model)
    sizes, hidden = _shapes(profile, sizes)
    n_heads, width = default_shape(int(profile.config.hidden_size))
    draw = torch.Generator().manual_seed(seed)

    def layer(inputs: int, n_gated: int) -> LayerGate:
        shapes = (
            (n_heads * width, inputs),
            (width, inputs),
            (width, inputs),
            (hidden, inputs + n_heads * width),
            (n_gated, hidden),
        )
        wq, wk, wv, w1, w2 = (torch.randn(*shape, generator=draw) / shape[1] ** 0.5 for shape in shapes)
        return LayerGate(wq, wk, wv, w1, torch.zeros(hidden), 2 * w2, torch.zeros(n_gated))

    return Gates([layer(*size) for size in sizes], model_mark(model), profile.name)


def _shapes(profile: ModelProfile, sizes: Sequence[tuple[int, int]] | None) -> tuple[Sequence[tuple[int, int]], int]:
    """Numbers that a token gives and KV heads of each layer, where `sizes` does not say; and the networks' width."""
    config = profile.config
    n_heads = profile.n_heads or 1
    n_kv_heads = int(named(config, "num_key_value_heads") or n_heads)
    head_dim = int(named(config, "head_dim") or config.hidden_size // n_heads)
    width = default_width(int(config.hidden_size))
    return sizes or [((n_heads + 2 * n_kv_heads) * head_dim, n_kv_heads)] * profile.n_layers, width
