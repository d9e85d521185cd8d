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
    """Return the column of each row that is drawn; never one without weight.

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
    """Return float64 numbers inside (0, 1) with 52 random bits.

    They are functions of `keys` and `ids`, int64, which broadcast.
    """
    z = keys + (ids + 1) * _STEP
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    z = z ^ _shifted(z, 31)
    return (_shifted(z, 12).double() + 0.5) * 2.0**-52


def _shifted(z: Tensor, n: int) -> Tensor:
    """Return `z` shifted right by n bits, zeros coming in."""
    return (z >> n) & ((1 << 64 - n) - 1)


#: Likeliest tokens that the fast path reads; a row that may keep more is sorted whole.
CANDIDATES = 256
#: Lower temperatures count as this one: only tokens as likely as the likeliest remain.
COLDEST = 1e-6
#: Rows that are read in float64 together.
ROWS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Parameters of the draw from each row: (S,) each.

    Attributes:
        temperature: Divisor of the logits, above 0.
        top_k: Number of the likeliest tokens kept; 0 keeps all.
        top_p: Share of probability; 1 keeps all.
        min_p: Share of the highest probability; 0 keeps all.
        typical_p: Share of probability; 1 keeps all.
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
    """Return 64 random bits, as a signed number, that depend on the three numbers alone.

    Example:
        >>> draw_key(1, 0, 0) == draw_key(1, 0, 0) != draw_key(1, 0, 1)
        True
    """
    digest = hashlib.blake2b(f"{seed}/{index}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def choose(logits: Tensor, choice: TokenChoice) -> Tensor:
    """Return token ids (S,), drawn from softmax(logits / temperature) after the filters.

    The order is top-k, top-p, min-p and typical-p. top-k keeps the k likeliest tokens; top-p the fewest of those that
    remain, likeliest first, whose share of what remains reaches p (Holtzman et al. 2020, eq. 2); min-p those at least
    min_p times as likely as the likeliest (Nguyen et al. 2024, eq. 2); typical-p see `_typical`. Tokens exactly as
    likely as the last one kept stay, too.

    Args:
        logits: (S, V) float32, each row with a finite maximum.
        choice: Parameters of each row.
    """
    size = logits.shape[-1]
    probs = (logits / choice.temperature[:, None].clamp(min=COLDEST)).softmax(-1)  # (S, V)
    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    typical = choice.typical_p < 1
    ordered = (((choice.top_k > 0) & (choice.top_k < size)) | (choice.top_p < 1)) & ~typical
    for rows in (part for typical_rows in _rows_of(typical) for part in torch.split(typical_rows, ROWS_AT_ONCE)):
        row_choice = choice[rows]
        tokens[rows] = race(_typical(_kept(probs[rows], row_choice), row_choice.typical_p), row_choice.keys)
    for rows in _rows_of(~(ordered | typical)):
        kept_probs = probs if len(rows) == len(probs) else probs[rows]
        if choice.min_p[rows].any():
            kept_probs = kept_probs.where(kept_probs >= choice.min_p[rows, None] * kept_probs.amax(-1, keepdim=True), 0)
        tokens[rows] = race(kept_probs, choice.keys[rows])
    for rows in _rows_of(ordered):
        row_probs = probs if len(rows) == len(probs) else probs[rows]
        values, ids = row_probs.topk(min(CANDIDATES, size))  # (R, C)
        tokens[rows], is_settled = _choose_sorted(values, ids, choice[rows])
        if size > CANDIDATES:
            for unsettled in _rows_of(~is_settled):
                ordering = probs[rows[unsettled]].sort(descending=True, stable=True)
                tokens[rows[unsettled]], _ = _choose_sorted(ordering.values, ordering.indices, choice[rows[unsettled]])
    return tokens


def _choose_sorted(values: Tensor, ids: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
    """Return tokens (R,) from the likeliest ids, and where these are enough (R,).

    They are enough if no token beyond them could have been kept.

    Args:
        values: Probabilities (R, C), in falling order.
        ids: Their tokens (R, C).
        choice: Parameters of each row.
    """
    by_rank, min_kept = _min_kept(values, choice)
    drawn = race(values.where(values >= min_kept, 0), choice.keys, ids)
    settled = (min_kept > values[:, -1:]) & ((choice.top_k[:, None] == 0) | (by_rank > values[:, -1:]))
    return ids.gather(1, drawn[:, None])[:, 0], settled[:, 0]


def _min_kept(values: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
    """Return the probabilities (R, 1) of the last tokens that top-k and that all filters keep.

    The first is 0 where top-k keeps all.
    """
    size = values.shape[-1]
    by_rank = values.gather(1, (choice.top_k[:, None] - 1).clamp(0, size - 1))
    by_rank = by_rank.where(choice.top_k[:, None] > 0, 0)
    total = values.where(values >= by_rank, 0).cumsum(-1, dtype=torch.float64)
    mass = total[:, -1:].where(choice.top_k[:, None] > 0, 1.0)
    mass_before = pad(total[:, :-1], (1, 0))
    last = (mass_before < choice.top_p[:, None] * mass).sum(-1, keepdim=True) - 1
    by_mass = values.gather(1, last).where(choice.top_p[:, None] < 1, 0)
    return by_rank, torch.maximum(torch.maximum(by_rank, by_mass), choice.min_p[:, None] * values[:, :1])


def _kept(probs: Tensor, choice: TokenChoice) -> Tensor:
    """Return the probabilities (R, V), 0 where top-k, top-p and min-p leave a token out."""
    if not (choice.top_k.any() or choice.min_p.any() or (choice.top_p < 1).any()):
        return probs
    _, min_kept = _min_kept(probs.sort(descending=True).values, choice)
    return probs.where(probs >= min_kept, 0)


def _typical(probs: Tensor, mass: Tensor) -> Tensor:
    """Return the probabilities (R, V), 0 except for the typical tokens with `mass` (R,).

    Locally typical sampling (Meister et al. 2022, eq. 8): with H = -sum_j p_j log p_j, the fewest tokens of the least
    |-log p_j - H| whose probabilities sum to `mass`. The given ones need not sum to 1.
    """
    share = probs.double() / probs.cumsum(-1, dtype=torch.float64)[:, -1:]  # not sum(), whose order may vary with R
    entropy = torch.special.entr(share).cumsum(-1)[:, -1:]
    distance = (-share.log() - entropy).abs()  # (R, V), infinite where p is 0
    limit = torch.empty_like(entropy)
    open_rows = torch.arange(len(probs), device=probs.device)
    for n in dict.fromkeys((min(CANDIDATES, probs.shape[-1]), probs.shape[-1])):
        nearest = distance[open_rows].topk(n, largest=False)
        reached = share[open_rows].gather(1, nearest.indices).cumsum(-1)
        last = (reached < mass[open_rows, None]).sum(-1, keepdim=True)
        limit[open_rows] = nearest.values.gather(1, last.clamp(max=n - 1))
        open_rows = open_rows[last[:, 0] >= n]
        if not len(open_rows):
            break
    return probs.where(distance <= limit, 0)


def _rows_of(mask: Tensor) -> tuple[Tensor, ...]:
    """Return the rows where the mask holds, or nothing: to be looped over once or not at all."""
    rows = mask.nonzero()[:, 0]
    return (rows,) if len(rows) else ()


_FEWEST_ROWS, _FEWEST_COLUMNS = 4, 64


@dataclass(slots=True)
class _Counted:
    """One completion with penalties.

    Attributes:
        params: Its penalties.
        row: Its row of the counts.
        columns: Column of each token that is counted there.
    """

    params: SamplingParams
    row: int
    columns: dict[int, int]


class Penalties:
    """Penalties and logit biases of every completion that has any.

    With c_j the occurrences of token j in the answer so far, logit l_j becomes (in this order)
    l_j / repetition if positive, else l_j * repetition, where j is in prompt or answer (Keskar et al. 2019, sec. 4.1);
    l_j - frequency * c_j - presence * [c_j > 0]; l_j + bias_j.

    Only tokens that have been seen take memory and time, not the whole vocabulary.
    """

    def __init__(self) -> None:
        self._counted: dict[Hashable, _Counted] = {}
        self._biases: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._free: list[int] = []
        self._tokens = torch.empty(0, 0, dtype=torch.long)  # (rows, columns)
        self._counts = torch.empty(0, 0, dtype=torch.int32)  # in the answer; 0: in the prompt alone

    @property
    def counts_bytes(self) -> int:
        """Bytes of the counts that are held now."""
        return self._tokens.nbytes + self._counts.nbytes

    def start(self, key: Hashable, params: SamplingParams, prompt: Sequence[int]) -> None:
        """Add a completion; one that has neither penalties nor biases costs nothing."""
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
        """Remove a completion; its row of counts is free again."""
        self._biases.pop(key, None)
        stopped = self._counted.pop(key, None)
        if stopped is not None:
            self._free.append(stopped.row)
        if not self._counted:
            self._tokens, self._counts, self._free = self._tokens[:0, :0].clone(), self._counts[:0, :0].clone(), []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._counted or key in self._biases

    def apply_(self, keys: Sequence[Hashable], logits: Tensor) -> None:
        """Change the logits (S, V), float32, in place; rows of other keys stay unchanged."""
        counted = [(i, self._counted[key]) for i, key in enumerate(keys) if key in self._counted]
        if counted:
            self._penalise_(counted, logits)
        for i, key in enumerate(keys):
            if key in self._biases:
                ids, values = self._biases[key]
                logits[i, ids.to(logits.device)] += values.to(logits.device)

    def count(self, keys: Sequence[Hashable], tokens: Sequence[int]) -> None:
        """Record the tokens that were chosen, one per key."""
        cells = []
        for key, token in zip(keys, tokens, strict=True):
            if key in self._counted:
                state = self._counted[key]
                cells.append((state.row, state.columns.setdefault(token, len(state.columns)), token))
        if cells:
            self._make_room(0, 1 + max(column for _, column, _ in cells))
            row, column, token_ids = torch.tensor(cells, device=self._tokens.device).unbind(1)
            self._tokens[row, column] = token_ids
            self._counts[row, column] += 1

    def _penalise_(self, counted: Sequence[tuple[int, _Counted]], logits: Tensor) -> None:
        device = logits.device
        self._tokens, self._counts = self._tokens.to(device), self._counts.to(device)
        row_values = [
            (
                i,
                counted_row.row,
                len(counted_row.columns),
                counted_row.params.repetition_penalty,
                counted_row.params.frequency_penalty,
                counted_row.params.presence_penalty,
            )
            for i, counted_row in counted
        ]
        logit_row, row, n_seen, repetition, frequency, presence = (
            torch.tensor(row_values, dtype=torch.float64).to(device).T
        )
        width = max(len(state.columns) for _, state in counted)
        rank, column = (torch.arange(width, device=device) < n_seen[:, None]).nonzero().unbind(1)  # of all seen tokens
        logit_index, count_row = logit_row.long()[rank], row.long()[rank]
        token, count = self._tokens[count_row, column], self._counts[count_row, column]
        repetition, frequency, presence = (penalty.float()[rank] for penalty in (repetition, frequency, presence))
        value = logits[logit_index, token]
        value = torch.where(value > 0, value / repetition, value * repetition)
        logits[logit_index, token] = value - frequency * count - presence * (count > 0)

    def _make_room(self, rows: int, columns: int) -> None:
        """Double the rows and columns where there are fewer than needed."""
        num_rows, num_columns = self._tokens.shape
        if rows > num_rows or columns > num_columns:
            new_rows = num_rows if rows <= num_rows else max(_FEWEST_ROWS, 2 * num_rows)
            new_columns = num_columns if columns <= num_columns else max(_FEWEST_COLUMNS, 2 * num_columns, columns)
            tokens, counts = (
                self._tokens.new_zeros(new_rows, new_columns),
                self._counts.new_zeros(new_rows, new_columns),
            )
            tokens[:num_rows, :num_columns], counts[:num_rows, :num_columns] = self._tokens, self._counts
            self._tokens, self._counts = tokens, counts
            self._free += range(num_rows, new_rows)


#: A log probability, and the likeliest tokens with theirs, the likeliest first.
Scored = tuple[float, tuple[tuple[int, float], ...]]

_ROWS_AT_ONCE = 64


def score_tokens(logits: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[Scored]:
    """Return the log probability of each token in its row, and of the `top` likeliest there.

    For the tokens of a prompt: row t of the logits that the prompt gives scores the prompt's token t + 1.

    Args:
        logits: (T, V), any float dtype; computed in float32, some rows at a time.
        tokens: One token per row.
        top: Number of the likeliest tokens, one per row.
    """
    scored: list[Scored] = []
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        block = slice(start, start + _ROWS_AT_ONCE)
        scored += _score_block(logits[block].log_softmax(-1, dtype=torch.float32), tokens[block], top[block])
    return scored


def _score_block(logprobs: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[Scored]:
    token_logprobs = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    if not any(top):
        return [(logprob, ()) for logprob in token_logprobs]
    top_logprobs = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]))  # fixed, so that ties fall alike in any batch
    likeliest = [
        tuple(sorted(zip(ids, row_logprobs, strict=True), key=lambda pair: (-pair[1], pair[0])))
        for ids, row_logprobs in zip(top_logprobs.indices.tolist(), top_logprobs.values.tolist(), strict=True)
    ]
    return [(logprob, candidates[:n]) for logprob, candidates, n in zip(token_logprobs, likeliest, top, strict=True)]
