"""States of a hybrid as named tensors, and back: their part of a file of a compressed text."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.errors import DataError
from millpond.hf.state_layers import States

#: What the names begin with; a layer's entries have its number there.
PREFIX = "state"
_KINDS = {"conv": "conv_states", "recurrent": "recurrent_states"}


def state_tensors(states: States) -> dict[str, Tensor]:
    """All states, on the host, as `state.<layer>.<kind>.<number>`."""
    return {
        f"{PREFIX}.{number}.{kind}.{i}": state.cpu().contiguous()
        for number, layer in states.layers.items()
        for kind, attribute in _KINDS.items()
        for i, state in getattr(layer, attribute).items()
        if state is not None
    }


def restore_states(states: States, stored: dict[str, Tensor], device: torch.device) -> None:
    """Fill the empty states of one sequence with what `state_tensors` gave.

    Raises:
        DataError: a layer's states are missing, or not those of one sequence; nothing was changed.
    """
    for number in states.layers:
        own = [tensor for name, tensor in stored.items() if name.startswith(f"{PREFIX}.{number}.")]
        if not own:
            raise DataError(f"layer {number}: the file lacks its states; save the text again")
        if any(tensor.ndim < 2 or len(tensor) != 1 for tensor in own):
            raise DataError(f"layer {number}: the file's states are not those of one text; save the text again")
    for number, layer in states.layers.items():
        for i in range(layer.number_of_states):
            conv, recurrent = (stored.get(f"{PREFIX}.{number}.{kind}.{i}") for kind in _KINDS)
            if conv is not None:
                layer.lazy_initialization(conv_states=conv.to(device), state_idx=i)
                layer.conv_states[i].copy_(conv)
                layer.has_previous_state[i] = True
            if recurrent is not None:
                layer.lazy_initialization(recurrent_states=recurrent.to(device), state_idx=i)
                layer.recurrent_states[i].copy_(recurrent)
