"""Recurrent and convolution states of the sequences of one batch, in transformers' own layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from millpond.cache.state.recurrent_states import StateSlots
from millpond.cache.swap import Content
from millpond.hf.empty_layer import EmptyLayer
from millpond.hf.state_layers import States


@dataclass(frozen=True, slots=True)
class StateShape:
    """What the layers of a hybrid hold of a sequence besides entries.

    Attributes:
        counts: number of a layer in the model -> how many states it has. depth: layers of the model.
        nbytes: of all states of one sequence. restarts: see `ModelProfile`.
    """

    counts: dict[int, int]
    depth: int
    nbytes: int
    restarts: bool


class CarriedStates(States):
    """States that go where the entries of their sequences go; see `RecurrentStates`.

    Attributes:
        cache: what a module that reads and writes them is given as its cache.

    Args:
        slots: what counts them; None: nothing does, as they are not kept.
    """

    def __init__(self, shape: StateShape, slots: StateSlots | None = None) -> None:
        super().__init__({number: LinearAttentionLayer(count) for number, count in shape.counts.items()})
        self.slots = slots
        nothing = EmptyLayer()
        self.cache = Cache(layers=[self.layers.get(number, nothing) for number in range(shape.depth)])
        if slots is not None:
            slots.count(self)

    @property
    def n_seq(self) -> int:
        """Sequences with states."""
        return next((len(state) for state in self.tensors()), 0)

    def join(self, other: Any) -> None:
        """Take over the states of another batch (`CarriedStates`) of the same model, which holds none afterwards."""
        if not self.n_seq:
            self.become(other, copied=False)
        elif other.n_seq:
            of_other = iter(other.tensors())
            self.replace(lambda state: torch.cat([state, next(of_other)]))
        other.reset()

    def part(self, sequences: list[int], into: Any) -> None:
        """Copy those of some sequences to `into` (`CarriedStates`), which holds none."""
        into.become(self, copied=False)
        into.select(sequences)

    def copy_out(self) -> Content:
        """All of them, on the host."""
        return tuple(torch.empty_like(state, device="cpu").copy_(state) for state in self.tensors())

    def drop(self) -> None:
        """Free their memory; `put_back` comes next, or `reset`."""
        self.replace(lambda state: state.new_empty(0))

    def put_back(self, content: Content) -> None:
        """Hold again what `copy_out` gave."""
        back = iter(content)
        self.replace(lambda state: next(back).to(state.device))
