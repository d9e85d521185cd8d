"""Choosing a token from each row: top-k, top-p, min-p and typical-p over the whole batch, then one draw per row.

A row's result depends on that row alone, bit for bit on the CPU: rows are sorted, summed and drawn from one by one, and
whether the short cut over the likeliest tokens is enough is settled per row.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from millpond.kernels.race import race

#: Likeliest tokens that the fast path reads; a row that may keep more is sorted whole.
CANDIDATES = 256
#: Lower temperatures count as this one: only tokens as likely as the likeliest are left.
COLDEST = 1e-6
#: Rows that are read in float64 together.
ROWS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """How each row is drawn from: (S,) each.

    Attributes:
        temperature: above 0. top_k: 0 keeps all. top_p, min_p, typical_p: shares of probability; 1, 0 and 1 keep all.
        keys: int64, random bits of this draw; see `draw_key`.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor
    keys: Tensor

    def __getitem__(self, rows: Tensor) -> TokenChoice:
        return TokenChoice(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.typical_p[rows],
            self.keys[rows],
        )


def draw_key(seed: int, index: int, step: int) -> int:
    """64 random bits, as a signed number, that depend on the three numbers and on nothing else.

    Example:
        >>> draw_key(1, 0, 0) == draw_key(1, 0, 0) != draw_key(1, 0, 1)
        True
    """
    digest = hashlib.blake2b(f"{seed}/{index}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def choose(logits: Tensor, choice: TokenChoice) -> Tensor:
    """Token ids (S,), drawn from softmax(logits / temperature) after top-k, top-p, min-p and typical-p, in this order.

    top-k keeps the k likeliest tokens; top-p the fewest of those left, likeliest first, whose share of what is left
    reaches p (Holtzman et al. 2020, eq. 2); min-p those at least min_p times as likely as the likeliest (Nguyen et al.
    2024, eq. 2); typical-p see `_typical`. Tokens exactly as likely as the last one kept stay, too.

    Args:
        logits: (S, V) float32, each row with a finite maximum.
    """
    size = logits.shape[-1]
    probs = (logits / choice.temperature[:, None].clamp(min=COLDEST)).softmax(-1)  # (S, V)
    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    typical = choice.typical_p < 1
    ordered = (((choice.top_k > 0) & (choice.top_k < size)) | (choice.top_p < 1)) & ~typical
    for rows in (some for whole in _where(typical) for some in torch.split(whole, ROWS_AT_ONCE)):
        own = choice[rows]
        tokens[rows] = race(_typical(_kept(probs[rows], own), own.typical_p), own.keys)
    for rows in _where(~(ordered | typical)):
        kept = probs if len(rows) == len(probs) else probs[rows]
        if choice.min_p[rows].any():
            kept = kept.where(kept >= choice.min_p[rows, None] * kept.amax(-1, keepdim=True), 0)
        tokens[rows] = race(kept, choice.keys[rows])
    for rows in _where(ordered):
        some = probs if len(rows) == len(probs) else probs[rows]
        values, ids = some.topk(min(CANDIDATES, size))  # (R, C)
        tokens[rows], enough = _choose_sorted(values, ids, choice[rows])
        if size > CANDIDATES:
            for more in _where(~enough):
                whole = probs[rows[more]].sort(descending=True, stable=True)
                tokens[rows[more]], _ = _choose_sorted(whole.values, whole.indices, choice[rows[more]])
    return tokens


def _choose_sorted(values: Tensor, ids: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
    """Tokens (R,) from the likeliest `ids` and their probabilities `values` (R, C), in falling order.

    And where these are enough (R,): no token beyond them could have been kept.
    """
    by_rank, least = _least(values, choice)
    drawn = race(values.where(values >= least, 0), choice.keys, ids)
    settled = (least > values[:, -1:]) & ((choice.top_k[:, None] == 0) | (by_rank > values[:, -1:]))
    return ids.gather(1, drawn[:, None])[:, 0], settled[:, 0]


def _least(values: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
    """The probabilities (R, 1) of the last token that top-k keeps (0: all), and of the last one kept after all."""
    size = values.shape[-1]
    by_rank = values.gather(1, (choice.top_k[:, None] - 1).clamp(0, size - 1))
    by_rank = by_rank.where(choice.top_k[:, None] > 0, 0)
    total = values.where(values >= by_rank, 0).cumsum(-1, dtype=torch.float64)
    mass = total[:, -1:].where(choice.top_k[:, None] > 0, 1.0)
    before = pad(total[:, :-1], (1, 0))
    last = (before < choice.top_p[:, None] * mass).sum(-1, keepdim=True) - 1
    by_mass = values.gather(1, last).where(choice.top_p[:, None] < 1, 0)
    return by_rank, torch.maximum(torch.maximum(by_rank, by_mass), choice.min_p[:, None] * values[:, :1])


def _kept(probs: Tensor, choice: TokenChoice) -> Tensor:
    """The probabilities (R, V), 0 where top-k, top-p and min-p leave a token out."""
    if not (choice.top_k.any() or choice.min_p.any() or (choice.top_p < 1).any()):
        return probs
    _, least = _least(probs.sort(descending=True).values, choice)
    return probs.where(probs >= least, 0)


def _typical(probs: Tensor, mass: Tensor) -> Tensor:
    """The probabilities (R, V), 0 but for the tokens whose surprise is nearest to the expected one, with `mass` (R,).

    Locally typical sampling (Meister et al. 2022, eq. 8): with H = -sum_j p_j log p_j, the fewest tokens of the least
    |-log p_j - H| whose probabilities sum to `mass`. What comes in need not sum to 1.
    """
    share = probs.double() / probs.cumsum(-1, dtype=torch.float64)[:, -1:]  # not sum(), whose order may vary with R
    entropy = torch.special.entr(share).cumsum(-1)[:, -1:]
    distance = (-share.log() - entropy).abs()  # (R, V), infinite where p is 0
    limit = torch.empty_like(entropy)
    left = torch.arange(len(probs), device=probs.device)
    for n in dict.fromkeys((min(CANDIDATES, probs.shape[-1]), probs.shape[-1])):
        near = distance[left].topk(n, largest=False)
        reached = share[left].gather(1, near.indices).cumsum(-1)
        last = (reached < mass[left, None]).sum(-1, keepdim=True)
        limit[left] = near.values.gather(1, last.clamp(max=n - 1))
        left = left[last[:, 0] >= n]
        if not len(left):
            break
    return probs.where(distance <= limit, 0)


def _where(mask: Tensor) -> tuple[Tensor, ...]:
    """The rows where the mask holds, or nothing: what is looped over once or not at all."""
    rows = mask.nonzero()[:, 0]
    return (rows,) if len(rows) else ()
