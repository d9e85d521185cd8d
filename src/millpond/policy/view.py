"""View of one layer of one sequence for a plan: entries, and signals about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from millpond.policy.fair_shares import FairSpans

Part = Literal["keys", "values"]
PARTS: tuple[Part, Part] = ("keys", "values")
#: Reads the stored keys (H, N, key_dim) or values (H, N, value_dim) of a view, at the cost of a copy.
Read = Callable[[Part], Tensor]


def columns_of(part: Tensor, order: Tensor | None) -> Tensor:
    """Return the columns of a part of entries (H, N) or (H, N, dim) in the given order (H, n).

    None: all as they are.
    """
    if order is None:
        return part
    if part.ndim == 2:
        return part.gather(1, order)
    n_heads, n, dim = part.shape
    rows = order + n * torch.arange(n_heads, device=order.device)[:, None]
    return part.reshape(n_heads * n, dim).index_select(0, rows.flatten()).view(*order.shape, dim)


@dataclass(frozen=True, slots=True)
class View:
    """Entries of one layer of one sequence, in the order of their positions.

    Attributes:
        positions: (H, N) int32, ascending along N; -1 where a head has no entry (all of these come last).
        signal: (H, N) float32, the attention that the score needs; None if it needs none.
        seen: Tokens of this sequence so far; the newest has position seen - 1.
        layer: Index of the layer.
        sequence: Row of the sequence in the batch that was first read; copies keep the number of their original.
        turn: Tokens of the newest turn, if it is not the first; else 0.
        budget: Entries per head on average that the plan may keep; 0 outside a plan.
        pinned: (H, N) bool, the entries that no score can evict; None outside a plan.
        read_entries: Returns keys and values when a score calls it; None if there are none to see.
        outputs: Returns the maps from values to the layer's output; None if there is no model.
        tokens: Returns the token ids of the entries; None if they are not known.
        head_attention: Returns attention by query head, see `received`; None if no queries are kept.
        head_kinds: (H,) int64, the `HeadRule` of each head since the first turn; None in that turn, or if heads have no
            rules of their own.
        head_local: Newest positions that `HeadRule.LOCAL` has kept since then.
        recent_attention: Attention of the last queries, see `window_signal`; None if no queries are kept.
        attention_rows: Attention of each of the last queries, see `window_rows`; None if no queries are kept.
        log_masses: (H, N) float32, the log of how many entries each one stands for; None if each is one.
        memory: State of the last merge of this sequence for the next; None for nothing.
        fair: Spans that keep a share of the budget; None for none.
        prompts: [begin, end) of the first prompt and of each later turn, oldest first, for a policy that protects them.
        repeated_rows: Attention of queries that repeated the prompt, see `rows_of_repetition`; None if none are kept.
        complete: Whether the host knows that every column has an entry.
    """

    positions: Tensor
    signal: Tensor | None
    seen: int
    layer: int
    sequence: int = 0
    turn: int = 0
    budget: int = 0
    pinned: Tensor | None = None
    read_entries: Read | None = None
    outputs: Callable[[], Tensor] | None = None
    tokens: Callable[[], Tensor] | None = None
    head_attention: Callable[[int, int], Tensor] | None = None
    head_kinds: Tensor | None = None
    head_local: int = 0
    recent_attention: Callable[[], Tensor] | None = None
    attention_rows: Callable[[int], Tensor] | None = None
    log_masses: Tensor | None = None
    memory: Tensor | None = None
    fair: FairSpans | None = None
    prompts: tuple[tuple[int, int], ...] = ()
    repeated_rows: Callable[[int], Tensor] | None = None
    complete: bool = False

    @property
    def keys(self) -> Tensor:
        """(H, N, key_dim) float32 or wider: keys as stored, after RoPE; 0 where there is no entry."""
        return self._part("keys")

    @property
    def values(self) -> Tensor:
        """(H, N, value_dim) float32 or wider: values as stored; 0 where there is no entry."""
        return self._part("values")

    @property
    def output_maps(self) -> Tensor:
        """(query heads, value_dim, hidden size): map of each query head's output to the layer's."""
        assert self.outputs is not None, "the cache of a model knows its output projections"
        return self.outputs()

    @property
    def ids(self) -> Tensor:
        """(H, N) int64: the token id of each entry; any number if there is none."""
        assert self.tokens is not None, "the cache keeps the token ids for a policy that reads them"
        return self.tokens()

    @property
    def masses(self) -> Tensor:
        """(H, N) float64: how many entries each one stands for; 1 if there is none."""
        if self.log_masses is None:
            return torch.ones(self.positions.shape, dtype=torch.float64, device=self.positions.device)
        return self.log_masses.double().masked_fill(~self.valid, 0).exp()

    @property
    def window_signal(self) -> Tensor:
        """(H, N) float32: attention that each entry has received from the last queries alone."""
        assert self.recent_attention is not None, "the cache keeps the last queries for a score that reads them"
        return self.recent_attention()

    def window_rows(self, head: int) -> Tensor:
        """Return (group, w, N): attention of each of the last w queries to a KV head's entries.

        It is float32 or wider, and that of every query head of its group; unlike `window_signal` nothing is summed.
        """
        assert self.attention_rows is not None, "the cache keeps the last queries for a score that reads them"
        return self.attention_rows(head)

    def rows_of_repetition(self, head: int) -> Tensor:
        """Return (group, m, N): attention of m queries to a KV head's entries.

        They are some of those that repeated the newest turn, of every query head of the group. It is float32 or wider;
        a row sums to 1 at most.
        """
        assert self.repeated_rows is not None, "the cache keeps queries of the repetition for a policy that reads them"
        return self.repeated_rows(head)

    def received(self, begin: int, end: int) -> Tensor:
        """Return (H, group, N) float32: attention to each entry from its KV head's query heads.

        The queries are those since the last plan: of the prompt, or of a later turn or chunk of it. Only queries at
        least `begin` and less than `end` positions after the entry count; end=0: all from `begin` on. Of many queries a
        policy may request some.
        """
        assert self.head_attention is not None, "the cache keeps the queries for a policy that reads them"
        return self.head_attention(begin, end)

    def stored(self, part: Part) -> Tensor:
        """Return (H, N, dim): keys or values in the dtype of the cache.

        They are undefined where there is no entry.
        """
        assert self.read_entries is not None, "the cache provides what it stores"
        return self.read_entries(part)

    def _part(self, part: Part) -> Tensor:
        entries = self.stored(part)
        entries = entries.to(torch.promote_types(entries.dtype, torch.float32))
        valid = self.valid
        return entries if self.complete or bool(valid.all()) else entries.masked_fill(~valid[..., None], 0)

    @property
    def valid(self) -> Tensor:
        """(H, N) bool: whether a column has an entry."""
        return self.positions >= 0

    def before_window(self, window: int) -> Tensor:
        """Return (H, N) bool: the entries before the newest `window` tokens."""
        return self.valid & (self.positions < self.seen - window)

    @property
    def free(self) -> Tensor:
        """(H, N) bool: entries that the score decides about."""
        return self.valid if self.pinned is None else self.valid & ~self.pinned

    @property
    def counts(self) -> Tensor:
        """(H,) entries per head."""
        return self.valid.sum(1)

    @property
    def heads(self) -> Tensor:
        """(H, 1) head indices."""
        return torch.arange(self.positions.shape[0], device=self.positions.device)[:, None]
