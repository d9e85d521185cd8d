"""Tokens of a request that its codes leave as they are, from the samples of the attention of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.engine.request_state import RequestState


def exact_positions(state: RequestState, n_layers: int) -> list[Tensor]:
    """Return the positions of the prompt's tokens that are exact, for each layer.

    They are int64; there are none without samples.
    """
    samples = state.samples
    if samples is None and state.private_cache is not None:
        samples = state.private_cache.samples  # its prompt is being read
    if samples is None or samples.n is None:
        return [torch.zeros(0, dtype=torch.int64)] * n_layers
    return [layer.nonzero()[:, 0] for layer in samples.exact()]
