"""A decoding step over entries in tiers by age: the decode kernel reads plain pages and the last tier, this the others.

Attention over a union is the mean of the attention over its parts, weighted by their denominators. Where scores are
made of attention, the kernel learns the denominator of the other tiers as a sink, so that it counts all entries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from millpond.cache.pages.aged_store import AgedStore
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, DecodeArgs, PageRegions, StepRegions
from millpond.kernels.decode_rules import DecodeRule, Signal
from millpond.kernels.eager.softmax import INF, reduce_group, soft_cap


class _Met(NamedTuple):
    """What queries met in one tier."""

    part: QuantizedStore
    logits: Tensor  #: (R, group, W) float32, -inf where a query sees nothing
    values: Tensor  #: (R, W, value_dim) float32


def decode_aged(
    table: PageTable,
    sealed: AgedStore,
    rule: DecodeRule,
    shape: AttentionShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend to all tiers, score them, and store the new entries; nothing leaves.

    Args:
        rule: with `Evict.NEVER`. q: (S, Hq, key_dim). k, v: (S, Hkv, dim). q_pos: (S,) int32.

    Returns:
        (S, Hq, value_dim) and the log-sum-exp (S, Hq).
    """
    n_seq, n_heads = q.shape[:2]
    met = [_meet(part, q, q_pos, shape) for part in sealed.middle]
    logits = torch.cat([one.logits for one in met], -1)
    lse = torch.logsumexp(logits, -1).reshape(n_seq, n_heads)  # -inf where there is nothing
    args = DecodeArgs(q.float(), k, v, table.step_regions(rule, shape, q_pos))
    if rule.signal is Signal.NONE:
        rest, rest_lse, _ = ops.decode(args)
        total = torch.logaddexp(rest_lse, lse)
        share = _weight(rest_lse, total)
    else:
        rest, total = _with_sinks(args, lse)
        share = torch.ones_like(total)
    seen = total.masked_fill(total == -INF, 0.0).reshape(logits.shape[:2])[..., None]
    p = torch.exp(logits - seen)
    begin, out = 0, rest.float() * share[..., None]
    for one in met:
        own = p[..., begin : begin + one.logits.shape[-1]]
        begin += one.logits.shape[-1]
        out = out + (own @ one.values).reshape(out.shape)
        _score(one.part, rule, own, q_pos)
    return out.to(q.dtype), total


def _meet(part: QuantizedStore, q: Tensor, q_pos: Tensor, shape: AttentionShape) -> _Met:
    """The logits of one tier, dequantized."""
    width = int(part.lens.max(initial=0))
    keys, values, positions, _, masses = ops.read_packed(part.regions(), width, part.head_dim)
    n_regions, pos = len(keys), q_pos.repeat_interleave(part.n_kv_heads)[:, None]
    logits = q.float().reshape(n_regions, -1, q.shape[-1]) @ keys.transpose(1, 2) * shape.scale
    logits = soft_cap(logits, shape.softcap)
    if masses is not None:
        logits = logits + masses[:, None]
    visible = (positions >= 0) & (pos >= 0)
    if shape.window:
        visible &= pos - positions < shape.window
    return _Met(part, logits.masked_fill(~visible[:, None], -INF), values.float())


def _weight(part: Tensor, total: Tensor) -> Tensor:
    """The share of a denominator, both as logarithms; 0 where there is nothing at all."""
    return torch.exp(part - total.masked_fill(total == -INF, 0.0))


def _with_sinks(args: DecodeArgs, lse: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.decode` with the denominators (S, Hq) of what it does not read; a kernel takes those of one sequence."""
    r, n_heads = args.regions, args.k_new.shape[1]
    assert r.packed is not None, "the last tier is packed"
    outs, totals = [], []
    for s in range(len(args.q)):
        one, rows = slice(s, s + 1), slice(s * n_heads, (s + 1) * n_heads)
        sink = lse[s] if r.shape.sink_logits is None else torch.logaddexp(lse[s], r.shape.sink_logits.float())
        plain = PageRegions(r.plain.pages, r.plain.table[rows], r.plain.lens[rows])
        regions = StepRegions(
            plain,
            r.caps[rows],
            r.recent[rows],
            r.q_pos[one],
            r.rule,
            replace(r.shape, sink_logits=sink.contiguous()),
            r.packed.part(rows),
        )
        out, total, _ = ops.decode(DecodeArgs(args.q[one], args.k_new[one], args.v_new[one], regions))
        outs.append(out)
        totals.append(total)
    return torch.cat(outs), torch.cat(totals)


def _score(part: QuantizedStore, rule: DecodeRule, p: Tensor, q_pos: Tensor) -> None:
    """What the decode kernel does to the accumulators of other entries; p: (R, group, W)."""
    if rule.signal is Signal.NONE or not p.shape[-1]:
        return
    rows = slice(0, len(part.lens))
    received, positions = reduce_group(p, rule.reduce, 1), part.positions(rows)
    if rule.signal is Signal.SUM:
        received = rule.decay * part.scores(rows) + received
    active = (q_pos >= 0).repeat_interleave(part.n_kv_heads)[:, None]
    part.rescore(rows, received, (positions >= 0) & active)
