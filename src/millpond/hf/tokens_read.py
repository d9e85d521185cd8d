"""Token ids of every column that a cache has read, to decide whether a prompt continues it."""

from __future__ import annotations

import torch
from torch import Tensor

#: Passes whose ids are stored apart: beyond it they are joined, since a tensor of one id takes hundreds of bytes.
_MAX_PARTS = 256


class TextRead:
    """Ids of all columns so far, pads included; none after a pass without ids."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []  # (S, n) of each pass
        self._columns = 0
        self._has_all_ids = True

    def add(self, ids: Tensor | None, columns: int) -> None:
        """Add the ids (S, n) of a pass after `columns` columns; later columns are forgotten."""
        if columns != self._columns:
            self._parts, self._columns = [self.ids[:, :columns]] if columns else [], columns
        if ids is None:
            self._has_all_ids = False
        elif self._has_all_ids:
            self._parts.append(ids.detach().clone())  # a view would keep the text of every step
            self._columns += ids.shape[1]
            if len(self._parts) >= _MAX_PARTS:
                self._parts = [self.ids]

    @property
    def ids(self) -> Tensor:
        """Ids of all columns, (S, n)."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts, 1)]
        return self._parts[0] if self._parts else torch.zeros(0, 0, dtype=torch.int64)

    def differs(self, ids: Tensor, mask: Tensor) -> tuple[int, int] | None:
        """Return the first (sequence, column) at which a prompt differs from the text, or None.

        Args:
            ids: Ids of the prompt, (S, n).
            mask: Which of the columns read are tokens, (S, columns) bool; only these are compared.
        """
        columns = mask.shape[1]
        text_ids = self.ids[:, :columns]
        if not self._has_all_ids or text_ids.shape != mask.shape:
            return None
        differences = ((text_ids.cpu() != ids[:, :columns].cpu()) & mask.cpu()).nonzero()
        return (int(differences[0, 0]), int(differences[0, 1])) if len(differences) else None

    def select(self, sequences: list[int]) -> None:
        """Follow a selection of sequences."""
        if self._parts:
            self._parts = [self.ids[sequences]]

    def copy(self) -> TextRead:
        """Return an independent copy."""
        other = TextRead()
        other._parts, other._columns, other._has_all_ids = list(self._parts), self._columns, self._has_all_ids
        return other

    def reset(self) -> None:
        """Forget everything."""
        self._parts, self._columns, self._has_all_ids = [], 0, True
