"""Penalties for tokens that an answer or its prompt has, and biases, on the device of the logits."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.engine.sampling.params import SamplingParams
from millpond.kernels.transfers import on_device

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
            self._tokens[row, : len(seen)] = on_device(torch.tensor(seen, dtype=torch.long), self._tokens.device)
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

    def apply_(self, keys: Sequence[Hashable], logits: Tensor, newest: Tensor | None = None) -> None:
        """Change the logits (S, V), float32, in place; rows of other keys stay unchanged.

        Args:
            keys: Names of the completions.
            logits: One row per key.
            newest: Newest token of each, (S,) int64 on the device of the logits, if it was not counted yet; None: all
                were.
        """
        counted = [(i, self._counted[key]) for i, key in enumerate(keys) if key in self._counted]
        if counted:
            self._penalise_(counted, logits, newest)
        for i, key in enumerate(keys):
            if key in self._biases:
                ids, values = (on_device(tensor, logits.device) for tensor in self._biases[key])
                self._biases[key] = ids, values
                logits[i, ids] += values

    def count(self, keys: Sequence[Hashable], tokens: Sequence[int]) -> None:
        """Record the tokens that were chosen, one per key."""
        cells = []
        for key, token in zip(keys, tokens, strict=True):
            if key in self._counted:
                state = self._counted[key]
                cells.append((state.row, state.columns.setdefault(token, len(state.columns)), token))
        if cells:
            self._make_room(0, 1 + max(column for _, column, _ in cells))
            row, column, token_ids = on_device(torch.tensor(cells), self._tokens.device).unbind(1)
            self._tokens[row, column] = token_ids
            self._counts[row, column] += 1

    def _penalise_(self, counted: Sequence[tuple[int, _Counted]], logits: Tensor, newest: Tensor | None) -> None:
        device = logits.device
        self._tokens, self._counts = on_device(self._tokens, device), on_device(self._counts, device)
        numbers = [
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
        columns = on_device(torch.tensor(numbers, dtype=torch.float64), device).T[:, :, None]  # (6, R, 1)
        logit_row, row, n_seen = columns[:3].long()
        repetition, frequency, presence = columns[3:].float()
        width = max(1, *(len(state.columns) for _, state in counted))
        tokens, counts = self._tokens[row[:, 0], :width], self._counts[row[:, 0], :width]
        is_seen = torch.arange(width, device=device) < n_seen
        counts = torch.where(is_seen, counts, counts[:, :1])
        tokens = torch.where(is_seen, tokens, tokens[:, :1])  # once more the first: no other number is written

        def penalised(values: Tensor, counts: Tensor) -> Tensor:
            repeated: Tensor = torch.where(values > 0, values / repetition, values * repetition)
            repeated = repeated - frequency * counts - presence * (counts > 0)
            return repeated

        of_seen = logits[logit_row, tokens]
        of_seen = torch.where(n_seen > 0, penalised(of_seen, counts), of_seen)
        if newest is None:
            logits[logit_row, tokens] = of_seen
            return
        last = newest[logit_row]  # (R, 1)
        n_last = torch.where(is_seen & (tokens == last), counts, 0).sum(1, keepdim=True) + 1
        of_last = penalised(logits[logit_row, last], n_last)
        logits[logit_row, tokens] = of_seen
        logits[logit_row, last] = of_last

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
