"""Log probabilities of tokens and of the likeliest ones: computed where the logits are, read when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from millpond.engine.sampling.params import MAX_LOGPROBS
from millpond.kernels.transfers import ReadBack, on_device

#: A log probability, and the likeliest tokens with theirs, the likeliest first.
Scored = tuple[float, tuple[tuple[int, float], ...]]

_ROWS_AT_ONCE = 64


class TokenScores(NamedTuple):
    """Log probabilities of T tokens.

    Attributes:
        logprobs: Of the tokens, (T,) float32.
        likeliest: The likeliest tokens of each row, (T, n) int64; n is 0 where none were requested.
        likeliest_logprobs: Their log probabilities, (T, n) float32.
    """

    logprobs: Tensor
    likeliest: Tensor
    likeliest_logprobs: Tensor

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, *, alternatives: bool) -> TokenScores:
        """Return the scores of one token (T,) per row of logits (T, V).

        With `alternatives` those of the likeliest ones too. The logits may have any float dtype; all is computed in
        float32, some rows at a time.
        """
        parts = [
            cls._of_block(logits[start : start + _ROWS_AT_ONCE], tokens[start : start + _ROWS_AT_ONCE], alternatives)
            for start in range(0, len(tokens), _ROWS_AT_ONCE)
        ]
        return parts[0] if len(parts) == 1 else cls(*map(torch.cat, zip(*parts, strict=True)))

    @classmethod
    def _of_block(cls, logits: Tensor, tokens: Tensor, alternatives: bool) -> TokenScores:
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        own = logprobs.gather(1, tokens[:, None])[:, 0]
        # as many whatever is asked for, so that ties fall alike in any batch
        top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]) if alternatives else 0)
        return cls(own, top.indices, top.values)

    def listed(self, top: Sequence[int]) -> list[Scored]:
        """Return the scores, once they are on the host, with the `top` likeliest of each row."""
        likeliest = [
            tuple(sorted(zip(ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0])))
            for ids, logprobs in zip(self.likeliest.tolist(), self.likeliest_logprobs.tolist(), strict=True)
        ]
        rows = zip(self.logprobs.tolist(), likeliest, top, strict=True)
        return [(logprob, candidates[:n]) for logprob, candidates, n in rows]


def score_tokens(logits: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[Scored]:
    """Return the log probability of each token in its row, and of the `top` likeliest there.

    For the tokens of a prompt: row t of the logits that the prompt gives scores the prompt's token t + 1.

    Args:
        logits: (T, V), any float dtype; computed in float32, some rows at a time.
        tokens: One token per row.
        top: Number of the likeliest tokens, one per row.
    """
    if not len(tokens):
        return []
    ids = on_device(torch.tensor(tokens), logits.device)
    return TokenScores(*ReadBack(TokenScores.of(logits, ids, alternatives=any(top))).wait()).listed(top)
