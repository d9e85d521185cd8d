"""Surprisal of each new token: -log P of it under the model's predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.cache.state.positions import ForwardSpan

#: Numbers of logits that are widened to float32 at a time: a few MB, which stay in the cache of a core.
BLOCK = 2**19


class Predictions:
    """Remembers what was predicted after the newest token of each sequence, for the pass to come."""

    def __init__(self) -> None:
        self._next: Tensor | None = None  # (S, vocabulary)

    def select(self, sequences: list[int]) -> None:
        """Follow a choice of sequences."""
        if self._next is not None:
            self._next = self._next[sequences]

    def entropies(self, logits: Tensor, ids: Tensor, span: ForwardSpan) -> Tensor:
        """(S, n) float32: -log P of each sequence's new tokens, in their order; anything after the last.

        The first token of a text has inf.

        Args:
            logits: (S, Q, vocabulary) of a pass. ids: (S, Q), its tokens.
        """
        if span.q_pos is not None and span.valid is None and self._next is not None:  # a token for each sequence
            out, self._next = surprise(self._next, ids[:, 0])[:, None], logits[:, 0].clone()
            return out
        n_seq, width, vocabulary = logits.shape
        rows, columns = torch.nonzero(span.grid().to(logits.device) >= 0, as_tuple=True)  # tokens, row by row, no pads
        own = ids[rows, columns]
        starts = torch.ones_like(rows, dtype=torch.bool)
        starts[1:] = rows[1:] != rows[:-1]
        place = torch.arange(len(rows), device=rows.device)
        place = place - place.masked_fill(~starts, 0).cummax(0).values
        out = torch.full((n_seq, width), torch.inf, device=logits.device)
        later = (~starts).nonzero()[:, 0]
        found = [
            surprise(logits[rows[tokens - 1], columns[tokens - 1]], own[tokens])
            for tokens in torch.split(later, max(1, BLOCK // vocabulary))
        ]
        out[rows[later], place[later]] = torch.cat(found) if found else out[:0, 0]
        known = torch.from_numpy(span.before > 0).to(rows.device)[rows] & starts
        before = logits.new_zeros(n_seq, vocabulary) if self._next is None else self._next.clone()
        out[rows[known], 0] = surprise(before[rows[known]], own[known])
        ends = starts.roll(-1)
        before[rows[ends]] = logits[rows[ends], columns[ends]]
        self._next = before
        return out


def surprise(logits: Tensor, ids: Tensor) -> Tensor:
    """(n,) float32: -log P(id) of ids (n,) under logits (n, vocabulary), in float32 or wider; inf for ids beyond it."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    inside = ids.clamp(max=logits.shape[-1] - 1)
    found = -logits.log_softmax(-1, dtype=wide).gather(-1, inside[:, None])[:, 0]
    return found.masked_fill(ids != inside, torch.inf).float()
