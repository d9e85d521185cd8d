"""Choice of a token from each row: top-k, top-p, min-p and typical-p, and one draw, of which no step waits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from millpond.kernels.backends import gpu_for, native_for
from millpond.kernels.transfers import on_device

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
    """Parameters of the draw from each row: (S,) each, on the host.

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

    def on(self, device: torch.device) -> TokenChoice:
        """Return the parameters on a device, in one copy."""
        if device.type == "cpu":
            return self
        parts = (self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p, self.keys)
        bits = torch.stack([t.double().view(torch.int64) if t.is_floating_point() else t for t in parts])
        moved = on_device(bits, device)
        return TokenChoice(
            *(
                bits_there.view(torch.float64).to(t.dtype) if t.is_floating_point() else bits_there
                for t, bits_there in zip(parts, moved, strict=True)
            )
        )

    @property
    def is_typical(self) -> Tensor:
        """Which rows typical-p changes, (S,) bool."""
        return self.typical_p < 1


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
    device, size = logits.device, logits.shape[-1]
    coldness = choice.temperature[:, None].clamp(min=COLDEST)
    probs = (logits / on_device(coldness, device)).softmax(-1)  # (S, V)
    typical = _rows_of(choice.is_typical)
    if gpu_for(probs.dtype, device) is not None:
        return _drawn_in_triton(probs, choice, typical)
    tokens = torch.empty(len(logits), dtype=torch.long, device=device)
    ordered = (((choice.top_k > 0) & (choice.top_k < size)) | (choice.top_p < 1)) & ~choice.is_typical
    for rows, here in _parts_of(typical, device):
        kept_probs = _of_typical(probs[here], choice[rows])
        tokens[here] = race(kept_probs, on_device(choice.keys[rows], device))
    for rows, here in _parts_of(_rows_of(~(ordered | choice.is_typical)), device, len(logits)):
        kept_probs = probs if len(rows) == len(probs) else probs[here]
        if choice.min_p[rows].any():
            min_p = on_device(choice.min_p[rows, None], device)
            kept_probs = kept_probs.where(kept_probs >= min_p * kept_probs.amax(-1, keepdim=True), 0)
        tokens[here] = race(kept_probs, on_device(choice.keys[rows], device))
    for rows, here in _parts_of(_rows_of(ordered), device, len(logits)):
        row_probs, row_choice = probs if len(rows) == len(probs) else probs[here], choice[rows].on(device)
        if device.type != "cpu":  # whether some would do is known there alone
            tokens[here], _ = _choose_sorted(*row_probs.sort(descending=True, stable=True), row_choice)
            continue
        values, ids = row_probs.topk(min(CANDIDATES, size))  # (R, C)
        tokens[rows], is_settled = _choose_sorted(values, ids, row_choice)
        if size > CANDIDATES and not is_settled.all():
            open_rows = _rows_of(~is_settled)
            ordering = row_probs[open_rows].sort(descending=True, stable=True)
            tokens[rows[open_rows]], _ = _choose_sorted(ordering.values, ordering.indices, row_choice[open_rows])
    return tokens


def _drawn_in_triton(probs: Tensor, choice: TokenChoice, typical: Tensor) -> Tensor:
    """Return the tokens of `choose` for probabilities (S, V).

    The rows `typical` are filtered here.
    """
    from millpond.kernels.gpu.draw import draw

    there = choice.on(probs.device)
    top_k, top_p, min_p = there.top_k, there.top_p, there.min_p
    for rows, here in _parts_of(typical, probs.device):
        probs[here] = _of_typical(probs[here], choice[rows])
    if len(typical):
        is_typical = there.is_typical
        top_k, top_p, min_p = (
            torch.where(is_typical, none, given) for given, none in ((top_k, 0), (top_p, 1.0), (min_p, 0.0))
        )
    return draw(probs, top_k, top_p, min_p, there.keys)


def _of_typical(probs: Tensor, choice: TokenChoice) -> Tensor:
    """Return the probabilities (R, V) of rows with typical-p, 0 where a token is left out."""
    return _typical(_kept(probs, choice), on_device(choice.typical_p, probs.device))


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
    _, min_kept = _min_kept(probs.sort(descending=True).values, choice.on(probs.device))
    return probs.where(probs >= min_kept, 0)


def _typical(probs: Tensor, mass: Tensor) -> Tensor:
    """Return the probabilities (R, V), 0 except for the typical tokens with `mass` (R,).

    Locally typical sampling (Meister et al. 2022, eq. 8): with H = -sum_j p_j log p_j, the fewest tokens of the least
    |-log p_j - H| whose probabilities sum to `mass`. The given ones need not sum to 1.
    """
    share = probs.double() / probs.cumsum(-1, dtype=torch.float64)[:, -1:]  # not sum(), whose order may vary with R
    entropy = torch.special.entr(share).cumsum(-1)[:, -1:]
    distance = (-share.log() - entropy).abs()  # (R, V), infinite where p is 0
    size = probs.shape[-1]
    if probs.device.type != "cpu":  # whether a few would do is known there alone
        limit, _ = _limit(distance, share, mass, size)
        return probs.where(distance <= limit, 0)
    limit, is_open = _limit(distance, share, mass, min(CANDIDATES, size))
    if is_open.any() and size > CANDIDATES:
        limit[is_open], _ = _limit(distance[is_open], share[is_open], mass[is_open], size)
    return probs.where(distance <= limit, 0)


def _limit(distance: Tensor, share: Tensor, mass: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the distance (R, 1) within which the nearest tokens reach `mass` (R,).

    The second result says where `n` of them do not, (R,) bool.
    """
    nearest = distance.topk(n, largest=False)
    reached = share.gather(1, nearest.indices).cumsum(-1)
    last = (reached < mass[:, None]).sum(-1, keepdim=True)
    return nearest.values.gather(1, last.clamp(max=n - 1)), last[:, 0] >= n


def _rows_of(mask: Tensor) -> Tensor:
    """Return the rows where a mask (S,) of the host holds, (n,) int64."""
    return mask.nonzero()[:, 0]


def _parts_of(rows: Tensor, device: torch.device, n: int = ROWS_AT_ONCE) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield at most `n` of the rows (m,) at a time, on the host and on a device.

    Nothing comes where there are none.
    """
    for part in torch.split(rows, n) if len(rows) else ():
        yield part, on_device(part, device)
