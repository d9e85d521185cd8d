"""Layers of hybrid models that hold recurrent or convolution states, in transformers' own caches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from millpond.cache.layer.draft_rollback import DraftRollback
from millpond.cache.layer.layer_cache import LayerCache
from millpond.errors import CacheMismatchError, OptionError, UnsupportedModelError
from millpond.hf.forward_hooks import ForwardHooks
from millpond.hf.layer import MillpondLayer
from millpond.hf.model_profile import ModelProfile
from millpond.hf.shared_keys import readers_of

#: Attributes of a layer of states that hold them: a number of the state -> a tensor, or None before the first token.
_PARTS = ("conv_states", "recurrent_states")
#: Other attributes that change with the tokens read, by number of the state.
_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")


class AttentionAndStates(LinearAttentionLayer, MillpondLayer):  # type: ignore[override]
    """Layer with attention and a state side by side (Falcon-H1, Zamba).

    Entries are in pages, states as in transformers.

    Args:
        number_of_states: Number of states of the layer.
        *args: Arguments of `MillpondLayer`.
    """

    is_compileable = False

    def __init__(self, number_of_states: int, *args: Any) -> None:
        MillpondLayer.__init__(self, *args)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Forget entries; `States` drops the states."""
        MillpondLayer.reset(self)

    def __repr__(self) -> str:
        return MillpondLayer.__repr__(self)


class States:
    """States of one cache, which are moved, copied and forgotten as its batch is.

    Args:
        layers: Layers with states by their number in the model; empty if it has attention alone.
        restarts: Whether the model begins them at zero in each pass of several tokens.

    Attributes:
        layers: Layers with states by their number in the model; empty if it has attention alone.
        restarts: Whether the model begins them at zero in each pass of several tokens.
        in_pass: Whether a pass has begun and has not ended.
    """

    def __init__(self, layers: dict[int, Any], restarts: bool = False) -> None:
        self.layers, self.restarts = layers, restarts
        self.in_pass = False

    def nbytes(self) -> int:
        """Return the bytes of all states."""
        return sum(state.nbytes for state in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Return an iterator over all states, (S, ...) each, layer by layer."""
        return (state for layer in self.layers.values() for state in _tensors(layer))

    def replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each state by the result of `change`, in the order of `tensors`."""
        for layer in self.layers.values():
            _replace(layer, layer, change)

    def select(self, sequences: list[int]) -> None:
        """Follow a selection of sequences."""
        self.replace(lambda state: state[torch.tensor(sequences, device=state.device)])

    def become(self, other: States, *, copied: bool = True) -> None:
        """Take the states of another cache of the same model: copies, or the tensors themselves.

        Without `copied` the other cache must drop them.
        """
        for number, layer in self.layers.items():
            other_layer = other.layers[number]
            _replace(layer, other_layer, torch.clone if copied else lambda state: state)
            for name in _FLAGS:
                setattr(layer, name, dict(getattr(other_layer, name)))
            layer.dtype, layer.device = other_layer.dtype, other_layer.device

    def reset(self) -> None:
        """Drop the states: the next batch may have another size."""
        self.in_pass = False
        for layer in self.layers.values():
            LinearAttentionCacheLayerMixin.__init__(layer, layer.number_of_states)

    def begin_pass(self, columns: int, length: int) -> None:
        """Begin a pass of `length` tokens after `columns`.

        Raises:
            UnsupportedModelError: the model would forget what it has read.
            CacheMismatchError: an earlier pass was interrupted, and some states have read its tokens.
        """
        if self.in_pass:
            raise CacheMismatchError(
                "a forward pass was interrupted, and recurrent states that have taken in its tokens cannot go back; "
                "call reset() and run the prompt again"
            )
        if self.restarts and columns and length > 1:
            raise UnsupportedModelError(
                f"this pass has {length} tokens behind {columns} that were read, and this family of models begins its "
                "recurrent states at zero in a pass of several tokens: give prompts whole (no prefill_chunk_size), and "
                "for a later turn call reset() and give the whole text"
            )
        self.in_pass = bool(self.layers)

    def end_pass(self) -> None:
        """End the pass."""
        self.in_pass = False

    def check_no_drafts(self) -> None:
        """Check that draft tokens can be rolled back.

        Raises:
            OptionError: the model holds states, which cannot be recorded.
        """
        if self.layers:
            raise OptionError(
                f"{self._description()} cannot go back, as assisted and prompt-lookup generation need it where a draft "
                "is rejected; generate without assistant_model and prompt_lookup_num_tokens"
            )

    def check_no_crop(self, n: int) -> None:
        """Check that `n` tokens can be removed.

        Raises:
            CacheMismatchError: tokens would be removed from states.
        """
        if self.layers and n:
            raise CacheMismatchError(
                f"cannot take back {n} tokens: {self._description()} cannot go back; fork() the cache before them, or "
                "reset() and run the text again"
            )

    def _description(self) -> str:
        return f"the recurrent and convolution states of layers {', '.join(map(str, self.layers))}"


def build_layers(
    profile: ModelProfile, layer_caches: Sequence[LayerCache], draft_rollback: DraftRollback, passes: ForwardHooks
) -> tuple[list[Any], States]:
    """Return the layers of a cache in the order of the model, and those that hold states.

    Args:
        profile: Profile of the model.
        layer_caches: Caches of the attention layers.
        draft_rollback: See `MillpondLayer`.
        passes: See `MillpondLayer`.
    """
    attention_layers = zip(layer_caches, profile.windows, profile.attending, strict=True)
    layer_args = [
        (layer_cache, draft_rollback, passes, window, number, readers_of(profile, number))
        for layer_cache, window, number in attention_layers
    ]
    if not profile.state_layers and len(profile.attending) == profile.depth:
        return [MillpondLayer(*args) for args in layer_args], States({})
    layers: list[Any] = list(DynamicCache(config=profile.config).layers)
    for number, args in zip(profile.attending, layer_args, strict=True):
        states = number in profile.state_layers
        layers[number] = AttentionAndStates(layers[number].number_of_states, *args) if states else MillpondLayer(*args)
    return layers, States({number: layers[number] for number in profile.state_layers}, profile.restarts)


def _tensors(layer: Any) -> list[Tensor]:
    return [state for name in _PARTS for state in getattr(layer, name).values() if state is not None]


def _replace(layer: Any, source: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Let the states of `layer` be the results of `change` for those of the layer `of`."""
    for name in _PARTS:
        states = getattr(source, name).items()
        setattr(layer, name, {i: None if state is None else change(state) for i, state in states})
