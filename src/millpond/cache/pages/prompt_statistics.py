"""Statistics of a prompt that a number format needs before it quantizes the first entry."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from millpond.codec.channels import channel_scores, kept_channels, query_balance
from millpond.codec.spec import Codec

#: Newest queries that decide which key channels stay (ThinK, arXiv:2407.21018).
ASKED = 32


class PromptStatistics(NamedTuple):
    """Sums and maxima over the queries and keys of one sequence; any split of a prompt into passes gives the same."""

    most_q: Tensor  #: (Hq, D) float32, the largest |q| of each channel
    most_k: Tensor  #: (Hkv, D) float32, the largest |k|
    last_q: Tensor  #: (Hq, <= ASKED, D), the newest queries
    squares: Tensor  #: (Hkv, D) float32, the sum of k^2

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> PromptStatistics:
        """Of new tokens: q (Hq, Q, D), k (Hkv, Q, D)."""
        return cls(
            q.float().abs().amax(1), k.float().abs().amax(1), q[:, -ASKED:].clone(), k.double().square().sum(1).float()
        )

    def merge(self, later: PromptStatistics) -> PromptStatistics:
        """Of two runs of tokens, the second after the first."""
        return PromptStatistics(
            torch.maximum(self.most_q, later.most_q),
            torch.maximum(self.most_k, later.most_k),
            torch.cat([self.last_q, later.last_q], 1)[:, -ASKED:],
            self.squares + later.squares,
        )

    def channels(self, codec: Codec) -> Tensor | None:
        """(Hkv, kept) int32, the key channels that stay; None: all."""
        if not codec.prune:
            return None
        return kept_channels(channel_scores(self.last_q, self.squares.sqrt()[:, None]), codec.prune)

    def balance(self, codec: Codec) -> Tensor | None:
        """(Hkv, D) float32, see `query_balance`; None: 1."""
        return query_balance(self.most_q[:, None], self.most_k[:, None]) if codec.balanced else None


def kept_dim(codec: Codec, dim: int) -> int:
    """How many of `dim` key channels the format keeps."""
    return kept_channels(torch.zeros(1, dim), codec.prune).shape[1] if codec.prune else dim
