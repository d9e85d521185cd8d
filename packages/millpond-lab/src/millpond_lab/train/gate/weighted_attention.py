"""Attention whose terms are multiplied by weights, with its gradients: entries that are hidden in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from millpond.kernels.args import AttentionShape

#: Denominators below it count as it: where nothing that is kept has any weight next to what was dropped.
LEAST_SUM = 1e-30
#: Rows of queries whose terms are in memory at a time.
ROWS = 128


def weighted_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt_keys: Tensor, prompt_values: Tensor, weights: Tensor, shape: AttentionShape
) -> Tensor:
    """Softmax whose terms of the prompt are multiplied by weights: a_ij = e^s_ij w_j / sum_j' e^s_ij' w_j'.

    A weight of 0 hides an entry, and its gradient says what the entry would have added. Later tokens see one another.

    Args:
        q: (query heads, m, key_dim), k: (KV heads, m, key_dim), v: (KV heads, m, value_dim), of the later tokens.
        prompt_keys, prompt_values: (KV heads, n, ...). weights: (KV heads, n) of the prompt's entries.
        shape: what attention does besides softmax(q k / sqrt d).

    Returns:
        (query heads, m, value_dim) in the dtype of `weights`.
    """
    keys, values = torch.cat([prompt_keys, k.to(prompt_keys)], 1), torch.cat([prompt_values, v.to(prompt_values)], 1)
    ones = weights.new_ones(len(weights), k.shape[1])
    return _attend(q, keys, values, torch.cat([weights, ones], 1), None, shape)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, flags: Tensor, always: Tensor, shape: AttentionShape) -> Tensor:
    """Attention by flags inside a text: a_ij = m_ij e^s_ij / sum_j' m_ij' e^s_ij', m_ij 1 where `always`, else flag_j.

    Args:
        q: (query heads, n, key_dim), k: (KV heads, n, key_dim), v: (KV heads, n, value_dim), of the whole text.
        flags: (KV heads, n), 0 or 1, whose gradients say what the entries add. always: (n, n) bool.
        shape: what attention does besides softmax(q k / sqrt d).

    Returns:
        (query heads, n, value_dim) in the dtype of `flags`.
    """
    return _attend(q, k.to(flags), v.to(flags), flags, always, shape)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, weights: Tensor, always: Tensor | None, shape: AttentionShape
) -> Tensor:
    """(query heads, m, value_dim) of the last m of N tokens, whose terms weights (KV heads, N) multiply.

    always: (m, N) bool, where the weight is 1 instead; None: nowhere.
    """
    out: Tensor = _WeightedAttention.apply(q.to(keys), keys, values, weights, always, shape)  # type: ignore[no-untyped-call]
    return out


class _Block:
    """Some rows of queries, and the entries that any of them sees.

    Attributes:
        rows: slice of the queries. columns: slice of the entries.
        q: (KV heads, group * rows, key_dim). keys, values: (KV heads, columns, ...).
    """

    def __init__(
        self, begin: int, q: Tensor, keys: Tensor, values: Tensor, always: Tensor | None, shape: AttentionShape
    ) -> None:
        n_rows, n = q.shape[1], keys.shape[1]
        end = min(begin + ROWS, n_rows)
        first = n - n_rows
        low = max(first + begin - shape.window + 1, 0) if shape.window else 0
        self.rows, self.columns = slice(begin, end), slice(low, first + end)
        self.q = self.of_group(q, len(keys))
        self.keys, self.values = keys[:, self.columns], values[:, self.columns]
        self.always = None if always is None else always[self.rows, self.columns]
        self._shape = shape
        at = torch.arange(low, first + end, device=q.device)
        row = torch.arange(first + begin, first + end, device=q.device)[:, None]
        hidden = at > row
        self._hidden = hidden | (row - at >= shape.window) if shape.window else hidden

    def of_group(self, x: Tensor, n_kv_heads: int) -> Tensor:
        """(KV heads, group * rows, dim) of x (query heads, m, dim)."""
        return x.view(n_kv_heads, -1, *x.shape[1:])[:, :, self.rows].reshape(n_kv_heads, -1, x.shape[-1])

    def ungrouped(self, x: Tensor, n_heads: int) -> Tensor:
        """(query heads, rows, dim) of x (KV heads, group * rows, dim)."""
        return x.view(n_heads, -1, x.shape[-1])

    def logits(self) -> Tensor:
        """(KV heads, group * rows, columns), least where nothing is seen."""
        logits = self.q * self._shape.scale @ self.keys.transpose(1, 2)
        if self._shape.softcap:
            logits = self._shape.softcap * torch.tanh(logits / self._shape.softcap)
        self.by_row(logits).masked_fill_(self._hidden, torch.finfo(logits.dtype).min)
        return logits

    def by_row(self, x: Tensor) -> Tensor:
        """(KV heads, group, rows, columns) of x (KV heads, group * rows, columns), the same memory."""
        return x.view(len(x), -1, self.rows.stop - self.rows.start, x.shape[-1])

    def weights(self, weights: Tensor) -> Tensor:
        """(KV heads, 1, rows or 1, columns) of weights (KV heads, N)."""
        own = weights[:, None, self.columns]
        return (own if self.always is None else torch.where(self.always, own.new_ones(()), own))[:, None]


class _WeightedAttention(torch.autograd.Function):
    """See `_attend`; the terms of a few rows at a time, made again for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, weights: Tensor, always: Tensor | None, shape: AttentionShape
    ) -> Tensor:
        n_heads, n_rows, _ = q.shape
        out = q.new_empty(n_heads, n_rows, values.shape[-1])
        most, total = (q.new_empty(n_heads, n_rows, 1) for _ in range(2))
        for begin in range(0, n_rows, ROWS):
            block = _Block(begin, q, keys, values, always, shape)
            terms = block.logits()
            top = block.ungrouped(terms.amax(-1, keepdim=True), n_heads)
            if shape.sink_logits is not None:
                sinks = shape.sink_logits.to(q).view(-1, 1, 1)
                top = top.maximum(sinks)
            terms.sub_(top.reshape(len(keys), -1, 1)).exp_()
            block.by_row(terms).mul_(block.weights(weights))
            own = block.ungrouped(terms.sum(-1, keepdim=True), n_heads)
            if shape.sink_logits is not None:
                own = own + (sinks - top).exp()
            own = own.clamp(min=LEAST_SUM)
            out[:, block.rows] = block.ungrouped(terms @ block.values, n_heads) / own
            most[:, block.rows], total[:, block.rows] = top, own
        ctx.save_for_backward(q, keys, values, weights, out, most, total)
        ctx.always, ctx.shape = always, shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, weights, out, most, total = ctx.saved_tensors
        shape, n_heads, n_kv_heads = ctx.shape, len(q), len(keys)
        grad = grad.contiguous()
        grads = tuple(torch.zeros_like(part) for part in (q, keys, values, weights))
        middle = (grad * out).sum(-1, keepdim=True)
        for begin in range(0, q.shape[1], ROWS):
            block = _Block(begin, q, keys, values, ctx.always, shape)
            logits = block.logits()
            slope = 1 - (logits.clamp(min=-shape.softcap) / shape.softcap) ** 2 if shape.softcap else None
            # what each entry would have with a weight of 1, and what that would add to the loss
            p = logits.sub_(block.of_group(most, n_kv_heads)).exp_().div_(block.of_group(total, n_kv_heads))
            own = block.of_group(grad, n_kv_heads)
            gain = (own @ block.values.transpose(1, 2)).sub_(block.of_group(middle, n_kv_heads)).mul_(p)
            by_weight = block.by_row(gain).sum(1)
            if block.always is not None:
                by_weight = by_weight.masked_fill_(block.always, 0)
            grads[3][:, block.columns] += by_weight.sum(1)
            seen = block.weights(weights)
            block.by_row(p).mul_(seen)
            block.by_row(gain).mul_(seen)
            if slope is not None:
                gain.mul_(slope)
            gain.mul_(shape.scale)
            grads[0][:, block.rows] = block.ungrouped(gain @ block.keys, n_heads)
            grads[1][:, block.columns] += gain.transpose(1, 2) @ block.q
            grads[2][:, block.columns] += p.transpose(1, 2) @ own
        return *grads, None, None
