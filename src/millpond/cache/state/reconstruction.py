"""Records the largest attention that each entry receives from tokens that are run but not stored (KVzip)."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.args import AttentionShape
from millpond.kernels.eager.softmax import soft_cap, wide, with_masses

#: Rows of queries that are read together.
BLOCK = 64


class ReconstructionProbe:
    """The largest attention by position, for the sequences of one layer."""

    def __init__(self, n_seq: int, n_kv_heads: int, tokens: int, device: torch.device) -> None:
        self._best = [torch.zeros(n_kv_heads, tokens, device=device)] * n_seq  # replaced, never written to

    def look(
        self,
        sequence: int,
        q: Tensor,
        lse: Tensor,
        q_pos: Tensor,
        keys: Tensor,
        positions: Tensor,
        shape: AttentionShape,
        log_masses: Tensor | None = None,
    ) -> None:
        """Take queries q (Hq, Q, D) with denominators lse (Hq, Q) over keys (H, N, D) at positions (H, N), -1: none.

        log_masses: (H, N), added to the logits; None for none.
        """
        n_heads, (n_kv_heads, n) = len(keys), self._best[sequence].shape
        here = (positions >= 0) & (positions < n)
        found = torch.zeros(positions.shape, device=q.device)
        kind = wide(q.dtype)
        for begin in range(0, q.shape[1], BLOCK):
            rows = slice(begin, begin + BLOCK)
            q_own = q[:, rows].to(kind).view(n_heads, -1, *q[:, rows].shape[1:])
            logits = soft_cap(q_own @ keys.to(kind)[:, None].transpose(-1, -2) * shape.scale, shape.softcap)
            logits = with_masses(logits, log_masses)
            distance = q_pos[rows][:, None] - positions[:, None, None, :]
            visible = here[:, None, None] & (distance >= 0)
            if shape.window:
                visible &= distance < shape.window
            p = (logits - lse[:, rows].view(n_heads, -1, logits.shape[2], 1)).exp().masked_fill(~visible, 0)
            found = torch.maximum(found, p.amax((1, 2)).float())
        column = torch.where(here, positions, n).long()
        by_head = torch.zeros(n_heads, n + 1, device=q.device).scatter_(1, column, found)[:, :n]
        self._best[sequence] = torch.maximum(self._best[sequence], by_head.view(n_kv_heads, -1, n).amax(1))

    def at(self, sequence: int, positions: Tensor) -> Tensor:
        """(H, N) float32: what was found at positions (H, N); 0 where -1."""
        return self._best[sequence].gather(1, positions.clamp(min=0).long()).masked_fill(positions < 0, 0)
