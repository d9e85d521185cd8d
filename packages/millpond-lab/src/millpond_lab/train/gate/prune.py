"""Pruning of trained gates: hidden units that decide nothing are left out of the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from millpond.policy.trained.networks import LayerGate

#: Of the flags on held-out texts, the share that may change.
CHANGED = 0.001
#: Units that a layer keeps at least; then twice as many, until few enough flags change.
LEAST_UNITS = 8


def pruned(gate: LayerGate, hidden: Sequence[Tensor]) -> LayerGate:
    """The gate with as few units as decide alike: those that move its logits most, the others at their means.

    hidden: (n, units) of each of some texts.
    """
    units = torch.cat(list(hidden))
    flags = (units @ gate.w2.T + gate.b2) > 0
    order = (gate.w2.abs().amax(0) * units.std(0)).argsort(descending=True)
    means = units.mean(0)
    count = LEAST_UNITS
    while count < len(order):
        kept, dropped = order[:count].sort().values, order[count:]
        bias = gate.b2 + gate.w2[:, dropped] @ means[dropped]
        found = (units[:, kept] @ gate.w2[:, kept].T + bias) > 0
        if float((found != flags).float().mean()) <= CHANGED:
            return replace(gate, w1=gate.w1[kept], b1=gate.b1[kept], w2=gate.w2[:, kept], b2=bias)
        count *= 2
    return gate
