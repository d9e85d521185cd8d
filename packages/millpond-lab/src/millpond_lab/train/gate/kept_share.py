"""Kept share of prompts under gates, and the shift of all biases with which texts keep a target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.policy.trained.networks import LayerGate
from millpond_lab.train.gate.objective import pinned_entries
from millpond_lab.train.retain.features import ReadPrompt

#: Halvings of the interval in which the shift is looked for.
HALVINGS = 30


def hidden_of(gate: LayerGate, prompts: Sequence[ReadPrompt], layer: int) -> list[Tensor]:
    """(n, hidden) of the gate of a layer, of each prompt."""
    features = [prompt.layers[layer].features.float() for prompt in prompts]
    return [gate.hidden(x, *gate.take(x)) for x in features]


def logits_of(layers: Sequence[LayerGate], hidden: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """(KV heads, n) by text and layer, of what `hidden_of` found by layer and text."""
    by_layer = [
        [F.linear(units, gate.w2, gate.b2).T for units in own] for gate, own in zip(layers, hidden, strict=True)
    ]
    return [list(found) for found in zip(*by_layer, strict=True)]


def flags_of(logits: Tensor, sinks: int, window: int) -> Tensor:
    """(KV heads, n) 0 or 1: what is kept of a prompt, given the logits of its tokens and the entries that stay."""
    return ((logits > 0) | pinned_entries(logits.shape[1], sinks, window, logits.device)).float()


def share_of(logits: Sequence[Tensor], sinks: int, window: int, shift: float = 0.0) -> float:
    """Share of the entries of one prompt that is kept with `shift` added to every bias.

    Args:
        logits: (KV heads, n) of each layer.
    """
    return float(torch.cat([flags_of(z + shift, sinks, window).flatten() for z in logits]).mean())


def shift_to(target: float, logits: Sequence[Sequence[Tensor]], sinks: int, window: int) -> float:
    """Number to add to every bias so that texts keep `target` in the mean, or as near as pinned entries let.

    Args:
        logits: (KV heads, n) by text and layer.
    """
    low, high = -30.0, 30.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        shares = [share_of(found, sinks, window, middle) for found in logits]
        low, high = (low, middle) if sum(shares) > target * len(shares) else (middle, high)
    return (low + high) / 2
