"""Log probabilities as the model gave them: before penalties, biases, temperature and constraints."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millpond.engine.sampling.params import MAX_LOGPROBS

#: A log probability, and the likeliest tokens with theirs, the likeliest first.
Scored = tuple[float, tuple[tuple[int, float], ...]]

_ROWS_AT_ONCE = 64


def score_tokens(logits: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[Scored]:
    """The log probability of each token in its row, and of the `top` likeliest tokens there.

    For the tokens of a prompt: row t of the logits that the prompt gives scores the prompt's token t + 1.

    Args:
        logits: (T, V), any float dtype; worked on in float32, some rows at a time. tokens, top: one per row.
    """
    scored: list[Scored] = []
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        block = slice(start, start + _ROWS_AT_ONCE)
        scored += _score_block(logits[block].log_softmax(-1, dtype=torch.float32), tokens[block], top[block])
    return scored


def _score_block(logprobs: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[Scored]:
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    if not any(top):
        return [(value, ()) for value in chosen]
    found = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]))  # fixed, so that ties fall alike in any batch
    likeliest = [
        tuple(sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0])))
        for ids, values in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]
    return [(value, row[:n]) for value, row, n in zip(chosen, likeliest, top, strict=True)]
