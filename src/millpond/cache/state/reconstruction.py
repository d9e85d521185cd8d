"""Recorder of the largest attention that each entry receives from tokens that are run but not stored (KVzip)."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.args import AttentionShape
from millpond.kernels.eager.softmax import soft_cap, wide, with_masses

#: Rows of queries that are read together.
BLOCK = 64


class ReconstructionProbe:
    """Largest attention by position, for the sequences of one layer, and some of the queries.

    Args:
        n_seq: Number of sequences.
        n_kv_heads: KV heads of the layer.
        tokens: Positions to record.
        device: Device of the layer.
        every: Of the queries of a pass, every so many is kept; 0 for none.
    """

    def __init__(self, n_seq: int, n_kv_heads: int, tokens: int, device: torch.device, every: int = 0) -> None:
        self._best = [torch.zeros(n_kv_heads, tokens, device=device)] * n_seq  # replaced, never written to
        self._every = every
        self._queries: dict[int, list[tuple[Tensor, Tensor]]] = {}

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
        """Record the attention of queries to the entries of a sequence.

        Args:
            sequence: Sequence in the batch.
            q: Queries, (Hq, Q, D).
            lse: Logs of their softmax denominators, (Hq, Q).
            q_pos: Positions of the queries, (Q,).
            keys: Keys, (H, N, D).
            positions: Positions of the keys, (H, N), -1 for none.
            shape: Scale, soft cap and window of the layer.
            log_masses: Added to the logits, (H, N); None for none.
        """
        if self._every:
            some = slice(self._every // 2, None, self._every)
            self._queries.setdefault(sequence, []).append((q[:, some].clone(), q_pos[some].clone()))
        n_heads, (n_kv_heads, n) = len(keys), self._best[sequence].shape
        is_entry = (positions >= 0) & (positions < n)
        if not (shape.softcap or shape.window) and int(q_pos[0]) >= n:
            largest = _largest(q, lse, keys, shape.scale, log_masses)
        else:
            largest = _largest_seen(q, lse, q_pos, keys, positions, shape, log_masses)
        column = torch.where(is_entry, positions, n).long()
        by_head = torch.zeros(n_heads, n + 1, device=q.device).scatter_(1, column, largest.float())[:, :n]
        self._best[sequence] = torch.maximum(self._best[sequence], by_head.view(n_kv_heads, -1, n).amax(1))

    def queries(self, sequence: int) -> tuple[Tensor, Tensor] | None:
        """Return the kept queries (Hq, m, D) and their positions (m,); None if there are none."""
        parts = self._queries.get(sequence)
        return None if parts is None else (torch.cat([q for q, _ in parts], 1), torch.cat([at for _, at in parts]))

    def at(self, sequence: int, positions: Tensor) -> Tensor:
        """Return the largest attention to positions (H, N), (H, N) float32; 0 at -1."""
        return self._best[sequence].gather(1, positions.clamp(min=0).long()).masked_fill(positions < 0, 0)


def _largest(q: Tensor, lse: Tensor, keys: Tensor, scale: float, log_masses: Tensor | None) -> Tensor:
    """Return the largest attention to each key, (H, N), of queries that see all of them.

    The denominators, and the masses of keys, are further channels of queries and keys: so the products are logarithms
    of probabilities, and only the largest of each column need be raised.
    """
    n_heads, dtype = len(keys), wide(q.dtype)
    ones = keys.new_ones(*keys.shape[:2], 1, dtype=dtype)
    extended = [keys.to(dtype), ones] if log_masses is None else [keys.to(dtype), ones, log_masses[..., None].to(dtype)]
    columns = torch.cat(extended, 2).transpose(1, 2)
    largest = torch.full(keys.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    for begin in range(0, q.shape[1], BLOCK):
        rows = slice(begin, begin + BLOCK)
        parts = [q[:, rows].to(dtype) * scale, -lse[:, rows, None].to(dtype)]
        if log_masses is not None:
            parts.append(torch.ones_like(parts[1]))
        queries = torch.cat(parts, 2).reshape(n_heads, -1, columns.shape[1])
        largest = torch.maximum(largest, (queries @ columns).amax(1))
    return largest.exp()


def _largest_seen(
    q: Tensor,
    lse: Tensor,
    q_pos: Tensor,
    keys: Tensor,
    positions: Tensor,
    shape: AttentionShape,
    log_masses: Tensor | None,
) -> Tensor:
    """Return the largest attention to each key, (H, N), of queries that see it; 0 for none."""
    n_heads, dtype = len(keys), wide(q.dtype)
    largest = torch.zeros(positions.shape, dtype=dtype, device=q.device)
    for begin in range(0, q.shape[1], BLOCK):
        rows = slice(begin, begin + BLOCK)
        q_part = q[:, rows].to(dtype).view(n_heads, -1, *q[:, rows].shape[1:])
        logits = soft_cap(q_part @ keys.to(dtype)[:, None].transpose(-1, -2) * shape.scale, shape.softcap)
        logits = with_masses(logits, log_masses)
        distance = q_pos[rows][:, None] - positions[:, None, None, :]
        visible = (positions >= 0)[:, None, None] & (distance >= 0)
        if shape.window:
            visible &= distance < shape.window
        p = (logits - lse[:, rows].view(n_heads, -1, logits.shape[2], 1)).exp().masked_fill(~visible, 0)
        largest = torch.maximum(largest, p.amax((1, 2)))
    return largest
