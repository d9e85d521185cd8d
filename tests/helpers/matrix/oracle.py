"""An independent simulation: the full cache stays, and what a method would have dropped is masked with -inf.

Written without any part of the package: plain loops over sequences, heads and entries, one attention row at a time.
A stock DynamicCache holds everything; this module's attention function keeps its own sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "millpond_test_oracle"


@dataclass
class Rule:
    """A method in plain words. `score`: sum | last | window | newest; `budget`: tokens, or a ratio of the prompt."""

    score: str
    budget: int | float
    sinks: int = 0
    recent: int | float = 0
    window: int = 0
    kernel: int = 1
    shared: bool = False
    decay: float = 1.0
    alpha: float | None = None
    evicts_while_decoding: bool = True


@dataclass
class Head:
    """One KV head of one sequence: kept positions, accumulated scores, how many it may keep."""

    kept: list[int] = field(default_factory=list)
    score: dict[int, float] = field(default_factory=dict)
    cap: int = 0


class Oracle:
    """The state of all layers for one batch, and the attention over it."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.heads: dict[tuple[int, int, int], Head] = {}
        self.seen: dict[int, int] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """q (B, Hq, Q, D), k and v (B, Hkv, T, D): everything ever seen. Returns (B, Hq, Q, D)."""
        out = torch.zeros_like(q)
        n_new = q.shape[2]
        for b in range(q.shape[0]):
            columns = list(range(k.shape[2])) if mask is None else mask[b, : k.shape[2]].nonzero()[:, 0].tolist()
            first = k.shape[2] - n_new
            n_past = sum(c < first for c in columns)
            keys, values = k[b][:, columns], v[b][:, columns]
            rows = [c - first for c in columns if c >= first]
            if rows:
                out[b][:, rows] = self._sequence(layer, b, q[b][:, rows], keys, values, n_past, scale)
        return out

    def _sequence(self, layer: int, b: int, q: Tensor, k: Tensor, v: Tensor, n_past: int, scale: float) -> Tensor:
        group = q.shape[0] // k.shape[0]
        out = torch.zeros_like(q)
        n = k.shape[1]
        rows_of: list[list[list[float]]] = []  # KV head -> query -> mean probabilities over all n positions
        for h in range(k.shape[0]):
            head = self.heads.setdefault((layer, b, h), Head())
            mean_rows = []
            for i in range(q.shape[1]):
                t = n_past + i
                hidden = torch.ones(n, dtype=torch.bool)
                hidden[head.kept] = False
                hidden[n_past : t + 1] = False
                mine = slice(h * group, (h + 1) * group)
                logits = (q[mine, i] @ k[h].T * scale).masked_fill(hidden, -math.inf)
                p = torch.softmax(logits, 1)
                out[mine, i] = p @ v[h]
                mean_rows.append(p.mean(0).tolist())
            rows_of.append(mean_rows)
        self._update(layer, b, rows_of, n_past, n)
        return out

    def _update(self, layer: int, b: int, rows_of: list[list[list[float]]], n_past: int, n: int) -> None:
        rule, is_step = self.rule, n_past > 0 and len(rows_of[0]) == 1
        heads = [self.heads[layer, b, h] for h in range(len(rows_of))]
        for head, rows in zip(heads, rows_of, strict=True):
            head.kept = [*head.kept, *range(n_past, n)]
            for j in head.kept:
                if rule.score == "sum":
                    for row in rows:
                        head.score[j] = rule.decay * head.score.get(j, 0.0) + row[j]
                elif rule.score == "last":
                    head.score[j] = rows[-1][j]
                elif rule.score == "newest":
                    head.score[j] = float(j)
                elif rule.score == "window" and not is_step:
                    head.score[j] = sum(row[j] for row in rows[-rule.window :]) / rule.window
        if is_step and not rule.evicts_while_decoding:
            return
        budget = round(rule.budget * n) if isinstance(rule.budget, float) else rule.budget
        if not is_step:
            for head in heads:
                head.cap = budget
        self._evict(heads, budget, n, is_step)

    def _value(self, head: Head, n: int, pooled: bool) -> dict[int, float]:
        if not pooled:
            return dict(head.score)
        before = [j for j in head.kept if j < n - self.rule.window]
        half = self.rule.kernel // 2
        return {j: max(head.score[x] for x in before[max(0, i - half) : i + half + 1]) for i, j in enumerate(before)}

    def _evict(self, heads: list[Head], budget: int, n: int, is_step: bool) -> None:
        rule = self.rule
        recent = int(rule.recent * budget) if isinstance(rule.recent, float) else rule.recent
        if is_step and isinstance(rule.budget, float):
            recent = self._recent_of_prompt(heads[0])
        elif isinstance(rule.budget, float):
            heads[0].score[-1] = float(recent)  # remembered beside the scores, under no position
        safe = [{j for j in h.kept if j < rule.sinks or j >= n - recent} for h in heads]
        values = [self._value(h, n, rule.score == "window" and not is_step) for h in heads]
        if rule.shared:
            mean = {j: sum(v[j] for v in values) / len(values) for j in heads[0].kept}
            values = [mean] * len(heads)
        if rule.alpha is not None and not is_step:
            self._share_budget(heads, values, safe, budget)
        for head, value, protected in zip(heads, values, safe, strict=True):
            free = sorted((j for j in head.kept if j not in protected), key=lambda j: (value[j], j))
            drop = set(free[: max(0, len(head.kept) - head.cap)])
            head.kept = [j for j in head.kept if j not in drop]

    def _recent_of_prompt(self, head: Head) -> int:
        return int(head.score[-1])

    def _share_budget(
        self, heads: list[Head], values: list[dict[int, float]], safe: list[set[int]], budget: int
    ) -> None:
        total = budget * len(heads)
        if sum(len(h.kept) for h in heads) <= total:
            return
        assert self.rule.alpha is not None
        counts, rest = [], []
        for i, (head, value, protected) in enumerate(zip(heads, values, safe, strict=True)):
            floor = max(1, len(protected) + int(self.rule.alpha * max(0, budget - len(protected))))
            free = sorted((j for j in head.kept if j not in protected), key=lambda j: (-value[j], -j))
            sure = free[: floor - len(protected)]
            counts.append(len(protected) + len(sure))
            rest += [(-value[j], i) for j in free[len(sure) :]]
        for _, i in sorted(rest)[: total - sum(counts)]:
            counts[i] += 1
        for head, count in zip(heads, counts, strict=True):
            head.cap = count


_active: list[Oracle] = []


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    index: int = module.layer_idx  # type: ignore[assignment]
    return _active[-1].attend(index, query, key, value, attention_mask, scale).transpose(1, 2), None


def padding(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    return attention_mask


def register() -> None:
    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, padding)


class running:
    """`with running(model, oracle):` the model attends through the oracle."""

    def __init__(self, model: Any, oracle: Oracle) -> None:
        self.model, self.oracle = model, oracle

    def __enter__(self) -> None:
        register()
        self.before = self.model.config._attn_implementation
        self.model.config._attn_implementation = NAME
        _active.append(self.oracle)

    def __exit__(self, *_: object) -> None:
        _active.pop()
        self.model.config._attn_implementation = self.before
