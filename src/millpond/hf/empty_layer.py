"""A layer of a cache that stores nothing, for any supported version of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from millpond.hf.single_pass_layer import PassLayer


class EmptyLayer(PassLayer):  # type: ignore[no-untyped-call]
    """Stands in a cache for a layer of the model that stores nothing there."""

    supports_early_init = False
    is_compileable = True
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """
        Raises:
            NotImplementedError: always; the layer has no attention of its own.
        """
        raise NotImplementedError("this layer stores nothing, so there is nothing to append to")

    def offload(self) -> None:
        """Nothing to move."""

    def prefetch(self) -> None:
        """Nothing to move."""

    def reset(self) -> None:
        """Nothing to forget."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to remove."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Nothing to reorder."""
