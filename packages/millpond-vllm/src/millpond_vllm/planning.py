"""Plans over blocks: which entries of several layers of one request fill the packed blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from millpond import NumericsError, Policy
from millpond.plugins import (
    AccumulatedAttention,
    AttentionShape,
    QueryMoments,
    QueryView,
    Recency,
    Reduce,
    Rotate,
    View,
    WindowAttention,
    WindowSignalArgs,
    window_probabilities,
    window_signal,
)

#: Scores that treat each KV head by itself, whatever its layer: layers are then planned together.
BY_HEAD = (AccumulatedAttention, Recency, WindowAttention)
_LATER = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class Competition:
    """Entries of one request in some layers; G = layers * KV heads, layer by layer.

    Attributes:
        keys: (G, N, key_dim), as stored.
        values: (G, N, value_dim), as stored.
        positions: (G, N) int32, ascending.
        n_compete: First columns that compete; the others are the newest entries.
        seen: Tokens of the request.
        layer: Number of the first layer in the model.
        sums: (G, N) float32: attention that each entry has gathered, or the score that it was written with; None if the
            policy needs none.
        queries: (Hq * layers, W, key_dim): the last queries, if the policy needs them.
        outputs: Returns (Hq * layers, value_dim, hidden): maps to the layers' outputs.
        moments: Moments of all queries, if the policy needs them; the layers are then one.
        rotate: Rotates queries as the layer does; None if it does not.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    n_compete: int
    seen: int
    layer: int
    sums: Tensor | None = None
    queries: Tensor | None = None
    outputs: Callable[[], Tensor] | None = None
    moments: QueryMoments | None = None
    rotate: Rotate | None = None


def plans_layers_together(policy: Policy) -> bool:
    """Whether the score of a head does not depend on its layer or on the layer's other heads."""
    return isinstance(policy.score, BY_HEAD) and not policy.shared


def kept_columns(
    policy: Policy,
    given: Competition,
    n_keep: int,
    shape: AttentionShape,
    *,
    sinks: int | None = None,
    spans: tuple[tuple[int, int], ...] = (),
) -> Tensor:
    """Return (G, n_keep) int64: columns below `n_compete` that stay, ascending.

    The budget is `n_keep` entries and the newest ones, which all stay (`Protect.recent`). A head whose attention is NaN
    keeps its newest entries: one broken request must not end the engine.

    Args:
        policy: Policy of the engine.
        given: What competes.
        n_keep: Entries per head that fill the packed blocks.
        shape: Scale and soft cap of the attention.
        sinks: First positions that stay; None for those of the policy.
        spans: Positions (begin, end) that stay.
    """
    newest = given.positions.shape[1] - given.n_compete
    first = policy.protect.sinks if sinks is None else sinks
    policy = replace(policy, protect=replace(policy.protect, recent=newest, grace=0, sinks=min(first, n_keep)))
    aside = _inside(given.positions, spans)
    aside[:, given.n_compete :] = False
    n_aside = int(aside[0].sum())
    order = torch.where(aside, _LATER, given.positions).argsort(dim=1, stable=True) if n_aside else None
    view = _view(policy, given, shape, aside, order)
    budget = n_keep + newest - n_aside
    try:
        keep = policy.plan(view, budget).keep
    except NumericsError:
        keep = replace(policy, score=Recency(), shared=False).plan(view, budget).keep
    if order is not None:
        keep = torch.zeros_like(keep).scatter_(1, order, keep) | aside
    kept = keep[:, : given.n_compete]
    return kept.nonzero()[:, 1].view(len(kept), n_keep)


def _inside(positions: Tensor, spans: tuple[tuple[int, int], ...]) -> Tensor:
    """Return (G, N) bool: whether a position lies in a span."""
    inside = torch.zeros_like(positions, dtype=torch.bool)
    for begin, end in spans:
        inside |= (positions >= begin) & (positions < end)
    return inside


def _view(policy: Policy, given: Competition, shape: AttentionShape, aside: Tensor, order: Tensor | None) -> View:
    """Return the view of a competition; entries `aside` are hidden and come last."""

    def ordered(part: Tensor) -> Tensor:
        if order is None:
            return part
        index = order if part.ndim == 2 else order[..., None].expand(-1, -1, part.shape[2])
        return part.gather(1, index)

    def latest() -> Tensor:
        assert given.queries is not None, "the window's queries are remembered for a score that reads them"
        width = given.queries.shape[1]
        at = torch.arange(given.seen - width, given.seen, dtype=torch.int32, device=given.queries.device)
        reduce = Reduce[policy.reduce.upper()]
        args = WindowSignalArgs(given.queries, given.keys, at, given.positions, shape, reduce)
        return ordered(window_signal(args))

    def rows(head: int) -> Tensor:
        assert given.queries is not None, "the window's queries are remembered for a score that reads them"
        group, width = len(given.queries) // len(given.keys), given.queries.shape[1]
        at = torch.arange(given.seen - width, given.seen, dtype=torch.int32, device=given.queries.device)
        one, own = slice(head, head + 1), slice(head * group, (head + 1) * group)
        args = WindowSignalArgs(given.queries[own], given.keys[one], at, given.positions[one], shape)
        found = window_probabilities(args)[0]
        return found if order is None else found[..., order[head]]

    signal = None
    if policy.gathers:
        assert given.sums is not None, "what entries gather is kept for a score that reads it"
        signal = ordered(given.sums)
    elif policy.window:
        signal = latest()
    view = View(
        ordered(given.positions.masked_fill(aside, -1)),
        signal,
        given.seen,
        given.layer,
        read_entries=lambda part: ordered(given.keys if part == "keys" else given.values),
        outputs=given.outputs,
        recent_attention=latest,
        attention_rows=rows,
    )
    if not policy.sums_queries:
        return view
    given_fields = {part.name: getattr(view, part.name) for part in fields(view)}
    return QueryView(**given_fields, moments=given.moments, rotate=given.rotate, scale=shape.scale)
