"""Protocol of a `MillpondCache` for its parts, so that none of them imports it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol

import torch

from millpond.cache.layer.draft_rollback import DraftRollback
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.cache.state.positions import PositionTracker
from millpond.hf.forward_hooks import ForwardHooks
from millpond.hf.prompt_parts import PromptParts
from millpond.hf.state_layers import States
from millpond.hf.tokens_read import TextRead


class LayerCaches(Protocol):
    """State of all layers of one cache.

    Attributes:
        tracker: Tokens seen.
        draft_rollback: Rollback of draft tokens.
        text: Ids of every column that was read.
        filled_inside: Whether its content was read by `generate` inside its `with` block.
        passes: Hooks on the model's passes.
        dtype: Dtype of the model.
        parts: State of a prompt that is read in several passes.
        states: States of the layers that hold some, in a hybrid.
        shared_layers: For the number of a layer that holds nothing, the number of the layer whose entries it reads.
    """

    tracker: PositionTracker
    draft_rollback: DraftRollback
    text: TextRead
    filled_inside: bool
    passes: ForwardHooks
    dtype: torch.dtype
    parts: PromptParts
    states: States
    shared_layers: dict[int, int]

    @property
    def entry_layers(self) -> dict[int, LayerCache]:
        """Caches of the attention layers by the number of the layer in the model."""

    @property
    def layer_caches(self) -> list[LayerCache]:
        """Caches of the layers."""

    @property
    def pools(self) -> list[RefCountedPool[Any]]:
        """Page pools, one per shape and format of entry."""

    @property
    def kin(self) -> Sized:
        """Caches that share those pools, this one among them."""

    def reset(self) -> None:
        """Forget every sequence."""
