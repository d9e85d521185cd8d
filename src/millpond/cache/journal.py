"""Journal: take back draft tokens exactly, after entries have been evicted to make room for them.

A pass that may be taken back holds tokens that are certain and then draft tokens. The certain ones are taken in as
ever. Then the layer's state is kept (its pages are shared, copied only when written), and the draft is decoded token
by token, as it would have been without drafting. `crop` goes back to the kept state and repeats the accepted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from millpond.cache.layer import AttentionShape, LayerCache, LayerState
from millpond.cache.timeline import Timeline
from millpond.errors import CacheMismatchError


@dataclass(slots=True)
class _Draft:
    """The state before a layer's draft tokens, and the tokens: q, k, v of shape (B, heads, draft, D)."""

    state: LayerState
    q: Tensor
    k: Tensor
    v: Tensor
    shape: AttentionShape


@dataclass(slots=True)
class Journal:
    """What is needed to take back the last pass, for all layers of one cache.

    Attributes:
        recording: set by `activate_past_recording`; off, passes are taken in as ever.
        draft: how many of the next pass's last tokens may be taken back; None: all but the first.
    """

    timeline: Timeline
    recording: bool = False
    draft: int | None = None
    _drafts: dict[int, _Draft] = field(default_factory=dict)
    _seen: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _columns: int = 0

    def attend(
        self, core: LayerCache, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape
    ) -> Tensor:
        """`LayerCache.attend`, remembering what `crop` will need."""
        self._discard(core.index)
        length = q.shape[2]
        draft = min(length - 1, length - 1 if self.draft is None else self.draft)
        if not self.recording or core.can_truncate(shape) or draft == 0:
            return core.attend(q, k, v, mask, shape)
        certain = length - draft
        outs = [core.attend(q[:, :, :certain], k[:, :, :certain], v[:, :, :certain], _until(mask, draft), shape)]
        self._columns = core.columns
        self._seen = self.timeline.span_after(core.columns)
        self._drafts[core.index] = _Draft(core.fork(), q[:, :, certain:], k[:, :, certain:], v[:, :, certain:], shape)
        for column in range(certain, length):
            part = slice(column, column + 1)
            outs.append(core.attend(q[:, :, part], k[:, :, part], v[:, :, part], _until(mask, length - column - 1), shape))
        return torch.cat(outs, 2)

    def crop(self, cores: list[LayerCache], n: int) -> None:
        """Take back the last `n` tokens of every layer.

        Raises:
            CacheMismatchError: entries have been evicted and no recording covers these tokens.
        """
        if n:
            self._check(cores, n)
            columns = self.timeline.columns - n
            self.timeline.rewind(columns if not self._drafts else self._columns, self._before(n))
            for core in cores:
                self._take_back(core, n)
        for index in list(self._drafts):
            self._discard(index)

    def reset(self) -> None:
        """Forget everything."""
        for index in list(self._drafts):
            self._discard(index)
        self.draft = None
        self.recording = False

    def _check(self, cores: list[LayerCache], n: int) -> None:
        for core in cores:
            draft = self._drafts.get(core.index)
            covered = n <= draft.q.shape[2] if draft is not None else core.truncatable
            if not covered:
                raise CacheMismatchError(
                    f"cannot take back {n} tokens: entries were evicted since and no recording covers them; call "
                    "activate_past_recording() before the pass, as assisted generation does"
                )

    def _before(self, n: int) -> np.ndarray:
        return self._seen if self._drafts else self.timeline.seen - n

    def _take_back(self, core: LayerCache, n: int) -> None:
        draft = self._drafts.get(core.index)
        if draft is None and not self._drafts:
            core.truncate(n)
            return
        if draft is None:  # a layer that keeps everything, beside others that do not
            core.truncate(n)
            self.timeline.rewind(core.columns, self._seen + (core.columns - self._columns))
            return
        core.restore(draft.state)
        for column in range(draft.q.shape[2] - n):
            part = slice(column, column + 1)
            core.attend(draft.q[:, :, part], draft.k[:, :, part], draft.v[:, :, part], None, draft.shape)

    def _discard(self, index: int) -> None:
        draft = self._drafts.pop(index, None)
        if draft is not None:
            draft.state.release()


def _until(mask: Tensor | None, hidden: int) -> Tensor | None:
    """The padding mask without its last `hidden` columns."""
    return mask if mask is None or hidden == 0 else mask[:, :-hidden]
