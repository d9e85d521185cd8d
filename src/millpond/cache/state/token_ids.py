"""Id of every token of each sequence, by position, for policies that read tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.errors import CacheMismatchError


class TokenIds:
    """Ids of all tokens seen, also of those whose entries were evicted.

    Args:
        required: Whether passes without ids are refused; else their tokens have id -1.
    """

    def __init__(self, required: bool = True) -> None:
        self._required = required
        self._ids = torch.zeros(0, 1, dtype=torch.int64)  # (S, capacity), the last column holds pads
        self._coming: Tensor | None = None
        self._first = 0

    def expect(self, ids: Tensor | None, first: int) -> None:
        """Expect the ids (S, columns) of the pass after `first` columns; None if it has none."""
        self._coming, self._first = ids, first

    def take(self, start: int, grid: Tensor, longest: int) -> None:
        """Store the ids of columns from `start` on, at positions `grid` (S, n), -1 for pads.

        Args:
            start: First column.
            grid: Positions of the tokens.
            longest: Tokens of the longest sequence.

        Raises:
            CacheMismatchError: the model was not given ids for these tokens, and they are required.
        """
        begin, (n_seq, n) = start - self._first, grid.shape
        ids = None if self._coming is None else self._coming[:, max(begin, 0) : begin + n]
        if (ids is None or ids.shape != grid.shape) and not self._required:
            ids = torch.full_like(grid, -1)
        if ids is None or ids.shape != grid.shape:
            raise CacheMismatchError(
                "this method looks at token ids, and the model was given none (inputs_embeds), or others than the "
                "tokens that reached the cache; pass input_ids"
            )
        self._grow(n_seq, longest + 1, grid.device)
        column = torch.where(grid < 0, self._ids.shape[1] - 1, grid.long())
        self._ids.scatter_(1, column, ids.to(self._ids))

    @property
    def device(self) -> torch.device:
        """Device of the ids."""
        return self._ids.device

    @property
    def all(self) -> Tensor:
        """Id at each position, (S, n) int64, n above every position; any number if there was none yet."""
        return self._ids

    def at(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """Return the ids of tokens of `sequences` (n,) at `positions` (n, ...); any id for -1."""
        rows = sequences.view(-1, *[1] * (positions.ndim - 1))
        return self._ids[rows, positions.long()]

    def select(self, sequences: list[int]) -> None:
        """Follow a selection of sequences."""
        self._ids = self._ids[sequences]

    def copy(self, sequences: list[int]) -> TokenIds:
        """Return an independent copy of some sequences."""
        other = TokenIds(self._required)
        other._ids = self._ids[sequences]
        return other

    def join(self, other: TokenIds) -> None:
        """Take the sequences of `other`, after these."""
        columns = max(self._ids.shape[1], other._ids.shape[1])
        own_ids = self._ids
        self._ids = own_ids.new_zeros(len(own_ids) + len(other._ids), columns).to(other._ids.device)
        self._ids[: len(own_ids), : own_ids.shape[1] - 1] = own_ids[:, :-1]
        self._ids[len(own_ids) :, : other._ids.shape[1] - 1] = other._ids[:, :-1]

    def reset(self) -> None:
        """Forget everything."""
        self._ids, self._coming, self._first = self._ids.new_zeros(0, 1), None, 0

    def _grow(self, n_seq: int, columns: int, device: torch.device) -> None:
        capacity = self._ids.shape[1]
        if len(self._ids) == n_seq and columns <= capacity:
            return
        grown = torch.zeros(n_seq, max(columns, 2 * capacity), dtype=torch.int64, device=device)
        grown[: len(self._ids), : capacity - 1] = self._ids[:, : capacity - 1]
        self._ids = grown
