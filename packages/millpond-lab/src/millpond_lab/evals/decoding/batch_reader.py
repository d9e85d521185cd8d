"""Reads sequences of different lengths with one model into one evicting cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.budget import Budget
from millpond.errors import NumericsError
from millpond.hf.cache import MillpondCache
from millpond.models.cache_argument import cache_argument


@dataclass(frozen=True, slots=True)
class Held:
    """What the cache holds of one row: entries over entries seen, and bytes as in `CacheStats`, of this row alone."""

    share: float
    kv_bytes: int
    full_kv_bytes: int


class BatchReader:
    """Rows of one batch. What a row reads and predicts does not depend on the other rows, beyond rounding.

    A pass of one token is a decoding step to the cache, a pass of more is not. So that a row meets the same passes in
    every batch, a single token is never hidden among the pads of a wider pass.

    A budget in bytes is of each row here, not of the whole cache.

    Attributes:
        logits: (rows, vocabulary) float32 or wider, after each row's newest token.
        seen: tokens that each row has read.
        pending: tokens at each row's end that were decided but not read; what is asked next begins with them.
    """

    def __init__(self, model: PreTrainedModel, cache: MillpondCache, openings: Sequence[Sequence[int]]) -> None:
        assert all(openings), "every row opens with at least one token"
        self.cache = cache
        self.seen = [0] * len(openings)
        self.pending: list[list[int]] = [[] for _ in openings]
        self.logits = torch.empty(0)
        self._model: Any = model
        self._budget = cache.budget
        self._mask = torch.ones(len(openings), 0, dtype=torch.long, device=model.device)
        known = inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._share_budget()
        self._pass(openings)

    @property
    def n_rows(self) -> int:
        return len(self.seen)

    def feed(self, tokens: Sequence[Sequence[int]]) -> None:
        """Read new tokens of each row, any number; a row without any stays as it is."""
        long = [own if len(own) > 1 else () for own in tokens]
        single = [own if len(own) == 1 else () for own in tokens]
        for part in (long, single):
            if any(part):
                self._pass(part)

    def select(self, rows: Sequence[int]) -> None:
        """Become these rows, in this order; one may be named many times: each is then a copy of its own."""
        if list(rows) == list(range(self.n_rows)):
            return
        index = torch.tensor(rows, dtype=torch.long)
        self.cache.batch_select_indices(index)
        here = index.to(self._mask.device)
        self._mask, self.logits = self._mask[here], self.logits[here]
        self.seen = [self.seen[row] for row in rows]
        self.pending = [list(self.pending[row]) for row in rows]
        self._share_budget()

    def held(self) -> list[Held]:
        """What each row holds now."""
        return [self._held(row) for row in range(self.n_rows)]

    def _held(self, row: int) -> Held:
        stored = held = full = regions = 0
        for core in self.cache.layer_caches:
            table = core.table
            if table is None:
                continue
            lens = core.stored[row]
            arrays = table.pool.arrays
            stored += int(lens.sum())
            regions += len(lens)
            held += int(table.kv_bytes()[row])
            full += self.seen[row] * len(lens) * (arrays.key_dim + arrays.value_dim) * self.cache.dtype.itemsize
        return Held(stored / (self.seen[row] * regions), held, full)

    def _share_budget(self) -> None:
        if self._budget is not None and self._budget.kind == "bytes":
            self.cache.budget = Budget("bytes", int(self._budget.amount) * self.n_rows)

    def _pass(self, tokens: Sequence[Sequence[int]]) -> None:
        device = self._mask.device
        width = max(map(len, tokens))
        ids = torch.zeros(self.n_rows, width, dtype=torch.long)
        valid = torch.zeros_like(ids)
        for row, own in enumerate(tokens):
            if own:
                ids[row, width - len(own) :] = torch.tensor(own)
                valid[row, width - len(own) :] = 1
        positions = (torch.tensor(self.seen)[:, None] + valid.cumsum(1) - 1).clamp(min=0)
        self._mask = torch.cat([self._mask, valid.to(device)], 1)
        out = self._model(
            input_ids=ids.to(device),
            attention_mask=self._mask,
            position_ids=positions.to(device),
            **cache_argument(self.cache),
            use_cache=True,
            **self._options,
        )
        fresh = out.logits[:, -1].to(torch.promote_types(out.logits.dtype, torch.float32))
        self.logits = fresh if all(tokens) else _chosen(tokens, fresh, self.logits)
        if bool(self.logits.isnan().any()):
            raise NumericsError("the model's predictions are NaN; check its weights and its dtype")
        self.seen = [seen + len(own) for seen, own in zip(self.seen, tokens, strict=True)]


def _chosen(tokens: Sequence[Sequence[int]], fresh: Tensor, before: Tensor) -> Tensor:
    """The new logits of rows that read something, the earlier ones of the others."""
    read = torch.tensor([bool(own) for own in tokens], device=fresh.device)
    return torch.where(read[:, None], fresh, before)
