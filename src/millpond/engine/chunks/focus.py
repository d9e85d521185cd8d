"""Focus of a question: the chunks that it attends to, found while its prompt runs through the layers (Cache-Craft)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from millpond.kernels.args import AttentionShape
from millpond.kernels.scattered_rows import attention_to_parts

#: Last tokens of a question whose attention is summed.
MAX_QUESTION = 32


@dataclass(slots=True)
class Focus:
    """Chunks of one prompt that its question attends to, summed over the layers so far.

    In focus are the fewest chunks that have more than `coverage` of the question's attention to chunks. The focus is
    stable when it stayed the same for `layers` layers.

    Attributes:
        spans: (begin, end) of each chunk in the prompt, in order.
        question: Index of the first token of the question.
        layers: Layers for which the focus must stay the same.
        coverage: Share of the attention to chunks, from 0 to 1.
        sums: Attention of the question to each chunk, summed over layers, (chunks,) float64.
        chosen: Numbers of the chunks in focus after the last layer.
        unchanged: Layers for which they stayed the same.
    """

    spans: Sequence[tuple[int, int]]
    question: int
    layers: int
    coverage: float
    sums: Tensor = field(init=False)
    chosen: frozenset[int] = frozenset()
    unchanged: int = 0

    def __post_init__(self) -> None:
        self.sums = torch.zeros(len(self.spans), dtype=torch.float64)

    @property
    def is_stable(self) -> bool:
        """Whether the focus stayed the same for long enough."""
        return self.unchanged >= self.layers

    def observe(self, rows: Tensor, q: Tensor, keys: Tensor, positions: Tensor, shape: AttentionShape) -> None:
        """Add the attention of a layer.

        Args:
            rows: Positions of the queries in the prompt, (R,) int64 on the host, ascending.
            q: Queries (Hq, R, key_dim).
            keys: Keys (Hkv, N, key_dim).
            positions: Positions of the keys, (Hkv, N) int32.
            shape: Scale, soft cap and window of the layer.
        """
        asking = torch.nonzero(rows >= self.question).flatten()[-MAX_QUESTION:]
        part_of = torch.full((int(positions.max()) + 1,), len(self.spans), dtype=torch.int64)
        for number, (begin, end) in enumerate(self.spans):
            part_of[max(begin, 1) : end] = number  # all tokens attend to the first one, whatever it is
        parts = part_of.to(q.device)[positions[0].long()]
        own_q, own_positions = q[:, asking.to(q.device)], rows[asking].to(q.device, torch.int32)
        masses = attention_to_parts(own_q, keys, own_positions, positions, shape, parts, len(self.spans))
        self.add(masses.sum(0).double().cpu())

    def add(self, masses: Tensor) -> None:
        """Add the attention of the question to each chunk in one layer, (chunks,) float64."""
        self.sums += masses
        order = torch.argsort(self.sums, descending=True, stable=True)
        shares = self.sums[order].cumsum(0) / self.sums.sum().clamp(min=1e-30)
        n = min(int((shares <= self.coverage).sum()) + 1, len(order))
        chosen = frozenset(order[:n].tolist())
        self.unchanged = self.unchanged + 1 if chosen == self.chosen else 0
        self.chosen = chosen

    def leaves_out(self, begin: int) -> bool:
        """Return whether the chunk that begins at a token is out of focus."""
        return all(self.spans[number][0] != begin for number in self.chosen)
