"""Spans of a text, such as the messages of a chat, of which every head keeps a share however low their scores are.

Under a budget of B entries per head, of a text of P tokens, a span of n tokens keeps in every head of a layer at least

    floor(n * min(share * B, F) / P)

entries, its best by the method's score, or all that the head still holds where that is fewer. The rest of the budget
goes by score. B is the layer's budget per head: where heads have budgets of their own, their mean. F is what sinks, the
newest entries that the method protects and kept spans leave of B, so that the shares of all spans always fit. Entries
that are protected or kept count towards the share of the span in which they lie. P and n count the tokens that the
layer sees: with a sliding window those inside of it. While a text is decoded P grows, and with it the part of the
budget that belongs to no span.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.kernels.eager.selection import priority
from millpond.kernels.transfers import on_device

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
#: Place of an empty span behind all others.
BEHIND = 2**31 - 1


def fewest(n_tokens: Ints, visible: Ints, shares_wanted: Floats, free: Ints) -> Ints:
    """Return (S, m) entries that each span keeps at least in every head.

    Args:
        n_tokens: (S, m) tokens of each span that the layer sees.
        visible: (S, 1) tokens of the text that the layer sees.
        shares_wanted: (S, m) share * B.
        free: (S, 1) F.
    """
    shares: Ints = np.floor(n_tokens * np.minimum(shares_wanted, np.maximum(free, 0)) / np.maximum(visible, 1)).astype(
        np.int64
    )
    return np.minimum(shares, n_tokens)


def best_of_spans(value: Tensor, valid: Tensor, pinned: Tensor, positions: Tensor, minimums: Tensor) -> Tensor:
    """Return (R, N) bool: the entries that must stay of each span of a row.

    Of a span they are the pinned entries first, then its best.

    Args:
        value: (R, N), higher is kept.
        valid: (R, N) bool, False in columns without an entry.
        pinned: (R, N) bool, entries that no score can evict.
        positions: (R, N) int32, -1 for none.
        minimums: (R, m, 3): spans [begin, end), ascending and disjoint, and the entries that stay of each.
    """
    order = priority(value, valid, pinned).argsort(dim=1, descending=True)
    begin, end, count = (part.contiguous() for part in minimums.to(positions.dtype).unbind(2))
    place = positions.masked_fill(~valid, -1).gather(1, order).contiguous()
    span = torch.searchsorted(begin, place, right=True) - 1
    span_index = span.clamp(min=0)
    span = torch.where((span >= 0) & (place < end.gather(1, span_index)), span, minimums.shape[1])  # m: of none
    by_span, back = span.sort(dim=1, stable=True)
    numbers = torch.arange(minimums.shape[1] + 1, device=place.device).expand(len(place), -1).contiguous()
    first = torch.searchsorted(by_span.contiguous(), numbers)
    rank = torch.arange(place.shape[1], device=place.device) - first.gather(1, by_span)
    count = torch.cat([count, torch.zeros_like(count[:, :1])], 1)
    stays = rank < count.gather(1, by_span)
    return torch.zeros_like(valid).scatter_(1, order.gather(1, back), stays)


@dataclass(frozen=True, slots=True)
class FairSpans:
    """Spans of one text as a plan of one layer sees them.

    Attributes:
        spans: (m, 2), ascending and disjoint.
        n_tokens: (m,) tokens of each span that the layer sees.
        visible: Tokens of the text that the layer sees.
        wanted: (m,) share * B.
        held: (H, m) entries of each span that stay whatever the plan says.
    """

    spans: Ints
    n_tokens: Ints
    visible: int
    wanted: Floats
    held: Tensor

    def pinned(self, value: Tensor, valid: Tensor, pinned: Tensor, positions: Tensor, budget: int) -> Tensor:
        """Return (H, N) bool: the entries that no score can evict, `pinned` ones included.

        Args:
            value: (H, N), higher is kept.
            valid: (H, N) bool, False in columns without an entry.
            pinned: (H, N) bool, entries pinned for other reasons.
            positions: (H, N) int32, -1 for none.
            budget: Entries per head that the plan may keep.
        """
        free = np.array([[budget - int((pinned & valid).sum(1).max())]])
        count = fewest(self.n_tokens[None], np.array([[self.visible]]), self.wanted[None], free)
        device = positions.device
        remaining = (on_device(count, device) - self.held).clamp(min=0)
        spans = on_device(self.spans, device).expand(len(positions), -1, -1)
        minimums = torch.cat([spans, remaining[..., None]], 2)
        return pinned | best_of_spans(value, valid, pinned, positions, minimums)
