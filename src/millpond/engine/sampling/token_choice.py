"""Choice of a token from each row: penalties, top-k, top-p, min-p and typical-p, one draw, and log probabilities."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from millpond.engine.sampling.params import MAX_LOGPROBS, SamplingParams
from millpond.kernels.backends import native_for

#: Constants of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers: what overflows wraps around.
_STEP, _FIRST, _SECOND = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def race(weights: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """The column of each row that is drawn; never one without weight.

    Args:
        weights: (R, C) float32, at least 0, each row with one above 0; they need not sum to 1.
        keys: (R,) int64, random bits of each row's draw.
        ids: (R, C) int64, the token of each column; None: the column's number.

    Returns:
        (R,) int64.
    """
    native = native_for(weights.dtype, weights.device)
    if native is not None and weights.stride(-1) == 1 and (ids is None or ids.stride(-1) == 1):
        drawn: Tensor = native.race(weights, keys, ids)
        return drawn
    if ids is None:
        ids = torch.arange(weights.shape[-1], device=weights.device)
    return (weights.double() / -uniform(keys[:, None], ids).log()).argmax(-1)


def uniform(keys: Tensor, ids: Tensor) -> Tensor:
    """Numbers float64 inside (0, 1) with 52 random bits, of keys and ids int64, which broadcast."""
    z = keys + (ids + 1) * _STEP
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    z = z ^ _shifted(z, 31)
    return (_shifted(z, 12).double() + 0.5) * 2.0**-52


def _shifted(z: Tensor, n: int) -> Tensor:
    """`z` shifted right by n bits, zeros coming in."""
    return (z >> n) & ((1 << 64 - n) - 1)


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


_FEWEST_ROWS, _FEWEST_COLUMNS = 4, 64


@dataclass(slots=True)
class _Counted:
    """One completion: its numbers, its row of the counts, and the column of each token that is counted there."""

    params: SamplingParams
    row: int
    columns: dict[int, int]


class Penalties:
    """The repetition, presence and frequency penalties and the logit biases of every completion that has any.

    With c_j the occurrences of token j in the answer so far, logit l_j becomes (in this order)
    l_j / repetition if positive, else l_j * repetition, where j is in prompt or answer (Keskar et al. 2019, sec. 4.1);
    l_j - frequency * c_j - presence * [c_j > 0]; l_j + bias_j.

    Only tokens that have been seen take room and time, not the whole vocabulary.
    """

    def __init__(self) -> None:
        self._counted: dict[Hashable, _Counted] = {}
        self._biases: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._free: list[int] = []
        self._tokens = torch.empty(0, 0, dtype=torch.long)  # (rows, columns)
        self._counts = torch.empty(0, 0, dtype=torch.int32)  # in the answer; 0: in the prompt alone

    @property
    def counts_bytes(self) -> int:
        """Of the counts that are held now."""
        return self._tokens.nbytes + self._counts.nbytes

    def start(self, key: Hashable, params: SamplingParams, prompt: Sequence[int]) -> None:
        """Take a completion on; one that has neither penalties nor biases costs nothing."""
        if params.logit_bias:
            values = torch.tensor([*params.logit_bias.values()], dtype=torch.float32)
            self._biases[key] = torch.tensor([*params.logit_bias]), values
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            seen = list(dict.fromkeys(prompt)) if params.repetition_penalty != 1 else []
            self._make_room(len(self._counted) + 1, len(seen))
            row = self._free.pop()
            self._tokens[row, : len(seen)] = torch.tensor(seen, dtype=torch.long, device=self._tokens.device)
            self._counts[row] = 0
            self._counted[key] = _Counted(params, row, {token: column for column, token in enumerate(seen)})

    def stop(self, key: Hashable) -> None:
        """Forget it; its row of counts is free again."""
        self._biases.pop(key, None)
        gone = self._counted.pop(key, None)
        if gone is not None:
            self._free.append(gone.row)
        if not self._counted:
            self._tokens, self._counts, self._free = self._tokens[:0, :0].clone(), self._counts[:0, :0].clone(), []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._counted or key in self._biases

    def apply_(self, keys: Sequence[Hashable], logits: Tensor) -> None:
        """Change the logits (S, V), float32, in place; rows of other keys stay as they are."""
        counted = [(i, self._counted[key]) for i, key in enumerate(keys) if key in self._counted]
        if counted:
            self._penalise_(counted, logits)
        for i, key in enumerate(keys):
            if key in self._biases:
                ids, values = self._biases[key]
                logits[i, ids.to(logits.device)] += values.to(logits.device)

    def count(self, keys: Sequence[Hashable], tokens: Sequence[int]) -> None:
        """The tokens that were chosen, one per key."""
        places = []
        for key, token in zip(keys, tokens, strict=True):
            if key in self._counted:
                state = self._counted[key]
                places.append((state.row, state.columns.setdefault(token, len(state.columns)), token))
        if places:
            self._make_room(0, 1 + max(column for _, column, _ in places))
            row, column, token_ids = torch.tensor(places, device=self._tokens.device).unbind(1)
            self._tokens[row, column] = token_ids
            self._counts[row, column] += 1

    def _penalise_(self, counted: Sequence[tuple[int, _Counted]], logits: Tensor) -> None:
        device = logits.device
        self._tokens, self._counts = self._tokens.to(device), self._counts.to(device)
        numbers = [
            (
                i,
                s.row,
                len(s.columns),
                s.params.repetition_penalty,
                s.params.frequency_penalty,
                s.params.presence_penalty,
            )
            for i, s in counted
        ]
        at, row, n_seen, repetition, frequency, presence = torch.tensor(numbers, dtype=torch.float64).to(device).T
        width = max(len(state.columns) for _, state in counted)
        rank, column = (torch.arange(width, device=device) < n_seen[:, None]).nonzero().unbind(1)  # of all seen tokens
        line, entry = at.long()[rank], row.long()[rank]
        token, count = self._tokens[entry, column], self._counts[entry, column]
        repetition, frequency, presence = (x.float()[rank] for x in (repetition, frequency, presence))
        value = logits[line, token]
        value = torch.where(value > 0, value / repetition, value * repetition)
        logits[line, token] = value - frequency * count - presence * (count > 0)

    def _make_room(self, rows: int, columns: int) -> None:
        """Double the rows and columns where there are fewer than needed."""
        had, width = self._tokens.shape
        if rows > had or columns > width:
            tall = had if rows <= had else max(_FEWEST_ROWS, 2 * had)
            wide = width if columns <= width else max(_FEWEST_COLUMNS, 2 * width, columns)
            tokens, counts = self._tokens.new_zeros(tall, wide), self._counts.new_zeros(tall, wide)
            tokens[:had, :width], counts[:had, :width] = self._tokens, self._counts
            self._tokens, self._counts = tokens, counts
            self._free += range(had, tall)


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
