"""Cache layers in the interface of transformers: over `cache.layer.LayerCache`, empty, or for a single pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from millpond.cache.layer.draft_rollback import DraftRollback
from millpond.cache.layer.latent_cache import LatentCache
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.layer.shared_entries import SharedEntries
from millpond.hf.attention import tag
from millpond.hf.attention_inputs import AttentionInputs
from millpond.hf.forward_hooks import ForwardHooks
from millpond.hf.grad_mode import no_autograd
from millpond.hf.model_profile import LatentShape, ModelProfile
from millpond.kernels.args import AttentionShape

#: Observer of the layers: called with the index of a layer and with q, k, v, mask and shape of each of its passes,
#: as in `LayerCache.attend`.
Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, AttentionShape], None]


class MillpondLayer(CacheLayerMixin):
    """Layer that tags new keys for the attention function, which calls `attend` with queries.

    Args:
        layer_cache: Cache of the layer.
        draft_rollback: Rollback of draft tokens of the whole cache.
        passes: Hooks on the model's passes.
        window: Positions that a query sees by the configuration of the model; 0 for all.
        number: Number of the layer in the model; None for its number among the attention layers.
        readers: Numbers of the layers that have no keys of their own and read this one's.

    Attributes:
        index: Number of the layer in the model.
        observer: Function that is called with every pass of the layer; None for none.
        inputs: What the attention modules read, for a policy that `reads_hidden`; None for others.
    """

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        layer_cache: LayerCache,
        draft_rollback: DraftRollback,
        passes: ForwardHooks,
        window: int = 0,
        number: int | None = None,
        readers: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window
        self.index = layer_cache.index if number is None else number
        self.readers = readers
        self.layer_cache = layer_cache
        layer_cache.shared = SharedEntries() if readers else None
        self.draft_rollback = draft_rollback
        self.passes = passes
        self.observer: Observer | None = None
        self.inputs: AttentionInputs | None = None

    @property
    def batch_size(self) -> int:
        """Sequences held, -1 before the first token."""
        return self.layer_cache.tracker.n_seq or -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: pages are allocated when the first entries arrive."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys, tagged, and the new values; stored ones stay in their pages.

        A model that expands latents gets the kept ones too, before the new ones.

        Raises:
            CacheMismatchError: the model is not the one that the cache was made for.
            UnsupportedModelError: the attention of the layer before did not come back to the cache.
        """
        self.passes.check_running()
        keys, values = self._offer(key_states, value_states)
        return tag(keys, self), values

    @no_autograd
    def _offer(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer_cache.before_rope(k, v)

    @no_autograd
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> Tensor:
        """See `LayerCache.attend`; the model made k and v from the result of `update`."""
        k, v = self.layer_cache.after_rope(k, v)
        if self.observer is not None and self.layer_cache.probe is None:
            self.observer(self.index, q, k, v, mask, shape)
        hidden = None if self.inputs is None else self.inputs.take(self.layer_cache.index)
        out = self.draft_rollback.attend(self.layer_cache, q, k, v, mask, shape, hidden)
        if not self.draft_rollback.recording:
            self.layer_cache.forget()
        return out

    @no_autograd
    def attend_shared(self, q: Tensor, shape: AttentionShape) -> Tensor:
        """Return the attention of another layer of the same pass to the entries of this one.

        q: (B, Hq, Q, D) -> (B, Hq, Q, V).
        """
        assert self.layer_cache.shared is not None, "a layer whose keys are read by others"
        return self.layer_cache.shared.attend(q, shape)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.layer_cache.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Return the columns seen (pads included), not the entries stored.

        Positions, masks and stop rules depend on it.
        """
        return self.layer_cache.columns

    def get_max_length(self) -> int:
        return -1

    @no_autograd
    def reset(self) -> None:
        self.layer_cache.reset()

    def offload(self) -> None:
        """Do nothing: stock offloading is not used with this cache."""

    def prefetch(self) -> None:
        """Do nothing: stock offloading is not used with this cache."""

    def __repr__(self) -> str:
        return f"MillpondLayer({self.index}, stored={self.layer_cache.stored.tolist()})"


def make_layer_cache(latent: LatentShape | None) -> Callable[..., LayerCache]:
    """Return the class or function that makes the cache of one layer."""
    if latent is None:
        return LayerCache
    return partial(LatentCache, latent_dim=latent.latent_dim, rope_dim=latent.rope_dim)


def give_inputs(profile: ModelProfile, layers: Iterable[object], passes: ForwardHooks) -> Callable[[], None]:
    """Give the layers of a cache what the attention modules of its passes read.

    Returns:
        Function that undoes it.

    Raises:
        UnsupportedModelError: the attention module of a layer was not found.
    """
    inputs = AttentionInputs(profile, lambda: passes.running)
    for layer in layers:
        if isinstance(layer, MillpondLayer):
            layer.inputs = inputs
    return inputs.close


class PassLayer(CacheLayerMixin):
    """Layer that reports an empty past to masks and positions; subclasses define `update`."""

    is_compileable = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: no entry is kept beyond the pass."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class EmptyLayer(PassLayer):  # type: ignore[no-untyped-call]
    """Placeholder in a cache for a layer of the model that stores no entries there."""

    supports_early_init = False
    is_compileable = True
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Refuse entries: the layer has no attention of its own.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("this layer stores nothing, so there is nothing to append to")

    def offload(self) -> None:
        """Do nothing: there is nothing to move."""

    def prefetch(self) -> None:
        """Do nothing: there is nothing to move."""

    def reset(self) -> None:
        """Do nothing: there is nothing to forget."""

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: there is nothing to remove."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do nothing: there is nothing to reorder."""
