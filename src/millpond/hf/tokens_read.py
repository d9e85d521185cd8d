"""Token ids of every column that a cache has read, to decide whether a prompt continues it."""

from __future__ import annotations

import torch
from torch import Tensor

#: Passes whose ids lie apart: beyond it they are put together, since a tensor of one id takes hundreds of bytes.
_MOST_PARTS = 256


class TextRead:
    """Ids of all columns so far, pads included; nothing is known after a pass that was given no ids."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []  # (S, n) of each pass
        self._columns = 0
        self._known = True

    def add(self, ids: Tensor | None, columns: int) -> None:
        """Return a pass with these ids (S, n) begins behind `columns` columns; what was taken back since is forgotten."""
        if columns != self._columns:
            self._parts, self._columns = [self.ids[:, :columns]] if columns else [], columns
        if ids is None:
            self._known = False
        elif self._known:
            self._parts.append(ids.detach().clone())  # a view would keep the text of every step
            self._columns += ids.shape[1]
            if len(self._parts) >= _MOST_PARTS:
                self._parts = [self.ids]

    @property
    def ids(self) -> Tensor:
        """Of all columns, (S, n)."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts, 1)]
        return self._parts[0] if self._parts else torch.zeros(0, 0, dtype=torch.int64)

    def differs(self, ids: Tensor, mask: Tensor) -> tuple[int, int] | None:
        """Return the first (sequence, column) at which a prompt of ids (S, n) is another text; None: there is none.

        mask: (S, columns) bool, which of the columns read hold tokens; only these are compared.
        """
        columns = mask.shape[1]
        own = self.ids[:, :columns]
        if not self._known or own.shape != mask.shape:
            return None
        apart = ((own.cpu() != ids[:, :columns].cpu()) & mask.cpu()).nonzero()
        return (int(apart[0, 0]), int(apart[0, 1])) if len(apart) else None

    def select(self, sequences: list[int]) -> None:
        """Follow a choice of sequences."""
        if self._parts:
            self._parts = [self.ids[sequences]]

    def copy(self) -> TextRead:
        """Return a copy that changes on its own."""
        other = TextRead()
        other._parts, other._columns, other._known = list(self._parts), self._columns, self._known
        return other

    def reset(self) -> None:
        """Forget everything."""
        self._parts, self._columns, self._known = [], 0, True
