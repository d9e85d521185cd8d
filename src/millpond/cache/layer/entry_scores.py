"""Scores that new tokens are written with, from hidden states, or from queries, keys and values before RoPE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from millpond.cache.state.gate_context import GateContext
from millpond.cache.state.positions import ForwardSpan
from millpond.cache.types import PerSequence, RotaryEmbedding
from millpond.errors import UnsupportedModelError
from millpond.policy.policy import Policy
from millpond.policy.trained.networks import Gates, LayerGate, features_of, kept_probability

#: Tokens whose rotation is undone at a time, so that a long prompt takes no copies of its queries and keys.
BLOCK = 1024


def new_entry_scores(
    policy: Policy,
    layer: int,
    rotary: RotaryEmbedding | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: ForwardSpan,
    contexts: PerSequence[GateContext],
) -> Tensor:
    """Return the scores that the new tokens of one pass are written with, (S, Hkv, Q) float32.

    Args:
        policy: Policy that scores entries, by trained heads or gates.
        layer: Index of the layer.
        rotary: Rotary embedding that was applied to q and k; None if there was none.
        q: Queries (S, Hq, Q, key_dim).
        k: Keys (S, Hkv, Q, key_dim).
        v: Values (S, Hkv, Q, value_dim).
        span: Positions of the pass.
        contexts: Tokens that the gate has read of each sequence; the new tokens join them.

    Raises:
        CacheMismatchError: the heads or gates are of a model of another shape.
    """
    if policy.gates is not None:
        return _gate_scores(policy.gates, layer, rotary, q, k, v, span, contexts)
    heads = policy.entry_scores
    assert heads is not None, "the heads of a model are found before its caches are made"
    scores = [heads.scores(layer, *part.qkv) for part in _unrotated(rotary, q, k, v, span)]
    return scores[0] if len(scores) == 1 else torch.cat(scores, -1)


def scores_of_hidden(policy: Policy, layer: int, hidden: Tensor | None, k: Tensor) -> Tensor:
    """Return the scores that the new tokens of one pass are written with, (S, Hkv, Q) float32.

    Args:
        policy: Policy that scores entries by networks over hidden states.
        layer: Index of the layer.
        hidden: What the attention module read of the tokens (S, Q, width).
        k: Keys (S, Hkv, Q, key_dim).

    Raises:
        UnsupportedModelError: nobody handed the hidden states over.
        CacheMismatchError: the networks are of a model of another shape.
    """
    networks = policy.hidden_networks
    assert networks is not None, "the networks of a model are found before its caches are made"
    if hidden is None or hidden.shape[:2] != (len(k), k.shape[2]):
        raise UnsupportedModelError(
            f"layer {layer}: this method scores entries by the hidden states that attention reads, and this pass hands "
            "over queries, keys and values alone; use a method that reads these, such as locret"
        )
    n_heads, states = k.shape[1], hidden.to(k.device)
    return torch.cat([networks.scores(layer, part, n_heads) for part in torch.split(states, BLOCK, 1)], -1)


def _gate_scores(
    gates: Gates,
    layer: int,
    rotary: RotaryEmbedding | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: ForwardSpan,
    contexts: PerSequence[GateContext],
) -> Tensor:
    """Return how surely each KV head keeps the new tokens, (S, Hkv, Q) float32; 0 at pads.

    Each sequence is computed alone, so the rest of the batch changes nothing. Arguments are those of
    `new_entry_scores`.
    """
    scores = torch.zeros(*k.shape[:3], device=k.device)
    valid = None if span.valid is None else torch.from_numpy(span.valid).to(q.device)
    read = span.before.copy()
    for columns, features in _features(rotary, q, k, v, span, cut=gates.causal):
        gate = gates.at(layer, features, k.shape[1])
        for s in range(len(features)):
            own = slice(None) if valid is None else valid[s, columns]
            tokens = features[s, own]
            if len(tokens):
                scores[s, :, columns][:, own] = _gate_tokens(gate, tokens, contexts, s, int(read[s]))
                read[s] += len(tokens)
    return scores


def _features(
    rotary: RotaryEmbedding | None, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan, *, cut: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Yield columns of a pass and the features (S, n, inputs) of their tokens, cut if asked."""
    parts = ((part.columns, features_of(*part.qkv)) for part in _unrotated(rotary, q, k, v, span))
    if cut:
        yield from parts
    else:  # each token of a prompt looks at all of it
        yield slice(None), torch.cat([features for _, features in parts], 1)


def _gate_tokens(
    gate: LayerGate, features: Tensor, contexts: PerSequence[GateContext], sequence: int, before: int
) -> Tensor:
    """Return p (KV heads, n) of tokens with features (n, inputs).

    They follow the first `before` tokens of their sequence.
    """
    queries, keys, values = gate.take(features)
    known = contexts.get(sequence)
    context = GateContext.of(keys, values) if known is None else known.extended(before, keys, values)
    contexts[sequence] = context
    return kept_probability(gate.logits(features, queries, context.keys, context.values))


class _Part(NamedTuple):
    """Some columns of a pass, with q, k and v before RoPE."""

    columns: slice
    qkv: tuple[Tensor, Tensor, Tensor]


def _unrotated(rotary: RotaryEmbedding | None, q: Tensor, k: Tensor, v: Tensor, span: ForwardSpan) -> Iterator[_Part]:
    """Yield the columns of a pass, `BLOCK` at a time."""
    grid = None if rotary is None else span.grid().clamp(min=0).long()
    for begin in range(0, q.shape[2], BLOCK):
        part = slice(begin, begin + BLOCK)
        queries, keys = q[:, :, part], k[:, :, part]
        if rotary is not None and grid is not None:
            both = rotary.rotate(torch.cat([queries, keys], 1), grid[:, part], inverse=True).to(q.dtype)
            queries, keys = both[:, : q.shape[1]], both[:, q.shape[1] :]
        yield _Part(part, (queries, keys, v[:, :, part]))
