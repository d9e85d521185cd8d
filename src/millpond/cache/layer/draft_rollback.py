"""Exact rollback of draft tokens, after entries were evicted to make room for them.

A pass that may be rolled back holds tokens that are certain and then draft tokens. The certain ones are read as in any
pass. Then the layer's state is kept (its pages are shared, copied only when written), and the draft is decoded token
by token, as it would have been without drafting. `crop` restores the kept state and repeats the accepted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.state.positions import PositionTracker
from millpond.cache.state.sequence_state import LayerSnapshot
from millpond.errors import CacheMismatchError
from millpond.kernels.args import AttentionShape


@dataclass(slots=True)
class _Draft:
    """State before a layer's draft tokens, and these tokens.

    They are q, k, v (B, heads, draft, D) and hidden (B, draft, width).
    """

    state: LayerSnapshot
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    shape: AttentionShape
    hidden: Tensor | None

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def replay(self, layer_cache: LayerCache, n: int) -> list[Tensor]:
        """Decode the first `n` tokens, one by one."""
        outs = []
        for column in range(n):
            q, k, v = (t[:, :, column : column + 1] for t in (self.q, self.k, self.v))
            hidden = None if self.hidden is None else self.hidden[:, column : column + 1]
            mask = _until(self.mask, self.length - column - 1)
            outs.append(layer_cache.attend(q, k, v, mask, self.shape, hidden))
        return outs


@dataclass(slots=True)
class DraftRollback:
    """Record of the last pass that a rollback needs, for all layers of one cache.

    Attributes:
        tracker: Positions of the sequences.
        truncatable: Whether nothing ever leaves any layer, so that the newest entries can be cut off without a
            recording.
        recording: Whether passes are recorded, set by `activate_past_recording`.
        draft: Last tokens of the next pass that may be rolled back; None for all but the first.
    """

    tracker: PositionTracker
    truncatable: bool = False
    recording: bool = False
    draft: int | None = None
    _drafts: dict[int, _Draft] = field(default_factory=dict)
    _seen: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _columns: int = 0

    def attend(
        self,
        layer_cache: LayerCache,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        shape: AttentionShape,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Attend as `LayerCache.attend`, and record what `crop` will need."""
        self._discard(layer_cache.index)
        length = q.shape[2]
        draft = min(length - 1, length - 1 if self.draft is None else self.draft)
        if not self.recording or self.truncatable or draft == 0:
            return layer_cache.attend(q, k, v, mask, shape, hidden)
        certain = length - draft
        q_now, k_now, v_now = (t[:, :, :certain] for t in (q, k, v))
        hidden_now, hidden = (None, None) if hidden is None else (hidden[:, :certain], hidden[:, certain:])
        out = layer_cache.attend(q_now, k_now, v_now, _until(mask, draft), shape, hidden_now)
        self._columns = layer_cache.columns
        self._seen = self.tracker.span_after(layer_cache.columns)
        q, k, v = (t[:, :, certain:] for t in (q, k, v))
        self._drafts[layer_cache.index] = _Draft(layer_cache.fork(), q, k, v, mask, shape, hidden)
        return torch.cat([out, *self._drafts[layer_cache.index].replay(layer_cache, draft)], 2)

    def crop(self, layer_caches: list[LayerCache], n: int) -> None:
        """Roll back the last `n` tokens of every layer.

        Raises:
            CacheMismatchError: entries have been evicted and no recording covers these tokens.
        """
        if n:
            self._check(layer_caches, n)
            if self._drafts:
                self._undo(layer_caches, n)
            else:
                tokens = self.tracker.tokens_in_last(n)
                self.tracker.rewind(self.tracker.columns - n, self.tracker.seen - tokens)
                for layer_cache in layer_caches:
                    layer_cache.truncate(n, tokens)
        self.commit()

    def commit(self) -> None:
        """Keep the drafted tokens: they can no longer be rolled back."""
        for draft in self._drafts.values():
            draft.state.release()
        self._drafts.clear()

    def reset(self) -> None:
        """Forget all drafts and settings."""
        self.commit()
        self.draft = None
        self.recording = False

    def _undo(self, layer_caches: list[LayerCache], n: int) -> None:
        self.tracker.rewind(self._columns, self._seen)
        for layer_cache in layer_caches:
            draft = self._drafts[layer_cache.index]
            layer_cache.restore(draft.state)
            draft.replay(layer_cache, draft.length - n)

    def _check(self, layer_caches: list[LayerCache], n: int) -> None:
        if n > self.tracker.columns:
            raise CacheMismatchError(f"cannot take back {n} tokens: the cache has seen {self.tracker.columns}")
        for layer_cache in layer_caches:
            draft = self._drafts.get(layer_cache.index)
            covered = layer_cache.truncatable if not self._drafts else draft is not None and n <= draft.length
            if not covered:
                raise CacheMismatchError(
                    f"cannot take back {n} tokens: entries were evicted since and no recording covers them; call "
                    "activate_past_recording() before the pass, as assisted generation does"
                )

    def _discard(self, index: int) -> None:
        draft = self._drafts.pop(index, None)
        if draft is not None:
            draft.state.release()


def _until(mask: Tensor | None, hidden: int) -> Tensor | None:
    """Return the padding mask without its last `hidden` columns."""
    return mask if mask is None or hidden == 0 else mask[:, :-hidden]
