"""Penalties on tokens that occurred before, from counts kept with the logits; and logit biases."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.engine.sampling.params import SamplingParams

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
