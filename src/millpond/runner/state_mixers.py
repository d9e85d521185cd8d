"""Modules of a hybrid that read and write states in a packed pass, and the states of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from millpond.cache.state.recurrent_states import StateSlots
from millpond.cache.swap import Content
from millpond.errors import UnsupportedModelError
from millpond.hf.layer import EmptyLayer
from millpond.hf.model_profile import ModelProfile
from millpond.hf.native_layers.forward_override import ForwardOverride
from millpond.hf.state_layers import States
from millpond.models.cache_argument import cache_argument
from millpond.models.lean.watch import own_forward
from millpond.runner.packed_cache import PackedPass, Segment


@dataclass(frozen=True, slots=True)
class StateShape:
    """States that the layers of a hybrid hold of a sequence besides entries.

    Attributes:
        counts: Number of a layer in the model -> how many states it has.
        depth: Layers of the model.
        nbytes: Bytes of all states of one sequence.
        restarts: See `ModelProfile`.
    """

    counts: dict[int, int]
    depth: int
    nbytes: int
    restarts: bool


class CarriedStates(States):
    """States that go where the entries of their sequences go; see `RecurrentStates`.

    Attributes:
        cache: Cache that is passed to a module that reads and writes them.

    Args:
        shape: Numbers of states and their bytes.
        slots: Counts them; None: nothing does, as they are not kept.
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
        """Take over the states of another batch of the same model, which holds none afterwards."""
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
        """Return all states, on the host."""
        return tuple(torch.empty_like(state, device="cpu").copy_(state) for state in self.tensors())

    def drop(self) -> None:
        """Free their memory; `put_back` comes next, or `reset`."""
        self.replace(lambda state: state.new_empty(0))

    def put_back(self, content: Content) -> None:
        """Restore what `copy_out` returned."""
        back = iter(content)
        self.replace(lambda state: next(back).to(state.device))


#: Methods of a layer of states that a module writes them with.
_WRITES = ("update_conv_state", "update_recurrent_state")


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replace the forward of a module that has states."""
    own = type(self).forward
    packed = next((value for value in (*args, *kwargs.values()) if isinstance(value, PackedPass)), None)
    if packed is None:
        return own(self, *args, **kwargs)
    segments = packed.segments

    def cut(value: Any, segment: Segment) -> Any:
        return _cut(value, segment, segments[-1].end)

    outputs = [
        own(self, *(cut(value, one) for value in args), **{name: cut(value, one) for name, value in kwargs.items()})
        for one in segments
    ]
    return _joined(outputs, segments)


_STAND_IN = ForwardOverride(forward)


def use_segments(mixers: list[nn.Module]) -> Callable[[], None]:
    """Let these modules run segment by segment in packed passes; returns what ends it."""
    return _STAND_IN.begin(mixers)


def find_mixers(model: PreTrainedModel, profile: ModelProfile) -> tuple[list[nn.Module], StateShape]:
    """Return the modules that write the states of a hybrid, and the shape of these states.

    One token runs through the model as transformers runs it, to see which module is at work when a state is written.

    Raises:
        UnsupportedModelError: a layer writes no state, or writes it in code that was put in place of a module's own.
    """
    cache = DynamicCache(config=profile.config)
    holders: dict[int, Any] = {number: cache.layers[number] for number in profile.state_layers}
    running: list[nn.Module] = []
    writers: dict[int, list[nn.Module]] = {number: [] for number in profile.state_layers}

    def noting(number: int, write: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            writers[number].append(running[-1])
            return write(*args, **kwargs)

        return noted

    for number in profile.state_layers:
        for name in _WRITES:
            setattr(holders[number], name, noting(number, getattr(holders[number], name)))
    hooks = [module.register_forward_pre_hook(lambda module, _: running.append(module)) for module in model.modules()]
    hooks += [
        module.register_forward_hook(lambda *_: running.pop() and None, always_call=True) for module in model.modules()
    ]
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        model(input_ids=token, position_ids=token, **cache_argument(cache), use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    mixers = list(dict.fromkeys(module for modules in writers.values() for module in modules))
    _check(profile.name, writers, mixers)
    counts = {number: holder.number_of_states for number, holder in holders.items()}
    states = [
        state
        for holder in holders.values()
        for name in ("conv_states", "recurrent_states")
        for state in getattr(holder, name).values()
    ]
    nbytes = sum(state.nbytes for state in states if state is not None)
    return mixers, StateShape(counts, profile.depth, nbytes, profile.restarts)


def _check(name: str, writers: dict[int, list[nn.Module]], mixers: list[nn.Module]) -> None:
    """Check that every state has one module that writes it.

    Raises:
        UnsupportedModelError: see `find_mixers`.
    """
    silent = next((number for number, modules in writers.items() if not modules), None)
    if silent is not None:
        raise UnsupportedModelError(f"layer {silent} of {name} hands no state to its cache")
    for module in mixers:
        if not _STAND_IN.serves(module) and own_forward(module) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} of {name} has a forward of its own, which the engine does not cut into the "
                "rows of its requests; remove it, or use compress(model, ...).generate"
            )


def _cut(value: Any, segment: Segment, n_rows: int) -> Any:
    """Return a module's input for one segment: its states, its rows of values with `n_rows`."""
    if isinstance(value, PackedPass):
        assert segment.states is not None, "sequences of a hybrid have states"
        return segment.states.cache
    if isinstance(value, tuple | list):
        return type(value)(_cut(one, segment, n_rows) for one in value)
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] != 1 or value.shape[1] != n_rows:
        return value
    rows = value[:, segment.begin : segment.end]
    return rows.transpose(0, 1) if segment.decoding else rows


def _joined(outputs: list[Any], segments: Sequence[Segment]) -> Any:
    """Return the outputs of all segments as that of the whole row."""
    if isinstance(outputs[0], tuple):
        return tuple(_joined(list(parts), segments) for parts in zip(*outputs, strict=True))
    if outputs[0] is None:
        return None
    rows = [part.transpose(0, 1) if one.decoding else part for part, one in zip(outputs, segments, strict=True)]
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)
