"""A cache of latents does what a cache of the expanded keys does whose heads share one set of positions."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import millpond as mp
from millpond.cache.layer.latent_cache import LatentCache
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.pool import PagePool
from millpond.cache.state.positions import PositionTracker
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from tests.helpers.hf.families import generate, left_padded, most_stored, shared_model

HEADS, LATENT, ROPE, NOPE, VALUE = 4, 6, 4, 5, 3
SHAPES = [
    AttentionShape(0.4),
    AttentionShape(0.4, softcap=3.0),
    AttentionShape(0.4, sink_logits=torch.tensor([0.3, -1.0, 2.0, 0.0])),
    AttentionShape(0.4, window=7),
]


class Model:
    """The part of a model that expands latents, with random weights and text."""

    def __init__(self, batch: int, length: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        make = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(LATENT, HEADS * (NOPE + VALUE), generator=make).to(dtype)
        self.q = torch.randn(batch, HEADS, length, NOPE + ROPE, generator=make).to(dtype)
        self.latent = torch.randn(batch, 1, length, LATENT, generator=make).to(dtype)
        self.rope = torch.randn(batch, 1, length, ROPE, generator=make).to(dtype)

    def expand(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = (latent[:, 0] @ self.weight).unflatten(-1, (HEADS, NOPE + VALUE)).transpose(1, 2)
        nope, values = both.split([NOPE, VALUE], -1)
        return torch.cat([nope, rope.expand(-1, HEADS, -1, -1)], -1), values


def layer(kind, policy, budget, **options):
    pools = {}

    def pool(key_dim, value_dim, dtype, device):
        return pools.setdefault(0, PagePool(key_dim, value_dim, dtype, device, slots=4))

    return kind(0, policy, lambda *of: budget, pool, PositionTracker(), **options)


def pair(method, budget, between_chunks=True, **options):
    policy = METHODS.get(method)(**options)
    latents = layer(LatentCache, policy, budget, latent_dim=LATENT, rope_dim=ROPE, between_chunks=between_chunks)
    return latents, layer(LayerCache, replace(policy, shared=True), budget, between_chunks=between_chunks)


def both(model, latents, expanded, columns, mask, shape):
    """One pass through the two; returns their outputs."""
    q, c, r = (t[:, :, columns] for t in (model.q, model.latent, model.rope))
    k, v = latents.after_rope(*model.expand(*latents.before_rope(c, r)))
    mine = latents.attend(q, k, v, mask, shape)
    k, v = model.expand(c, r)
    return mine, expanded.attend(q, k, v, mask, shape)


METHODS_WITH_BUDGETS = [
    ("full", 99, {}),
    ("h2o", 6, {}),
    ("h2o", 6, {"average": True, "sinks": 1}),
    ("h2o", 6, {"prefill": "greedy"}),
    ("h2o", 6, {"decay": 0.7}),
    ("h2o", 6, {"decay": 0.7, "reduce": "max"}),
    ("h2o", 6, {"reduce": "sum"}),
    ("tova", 5, {}),
    ("window", 5, {}),
    ("snapkv", 6, {"window": 3, "pool": "none"}),
]


@pytest.mark.covering
@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "softcap", "sinks", "window"])
@pytest.mark.parametrize(("method", "budget", "options"), METHODS_WITH_BUDGETS)
def test_equals_expanded_keys_that_share_positions(method, budget, options, shape):
    model, mask = Model(3, 30), torch.ones(3, 30, dtype=torch.bool)
    mask[0, :5], mask[2, :2] = False, False
    mask[1, 22] = False  # a sequence that pauses while the others go on
    latents, expanded = pair(method, budget, **options)
    for begin, end in [(0, 12), (12, 17), *((i, i + 1) for i in range(17, 30))]:
        mine, theirs = both(model, latents, expanded, slice(begin, end), mask[:, :end], shape)
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        for sequence in range(3):
            row = latents.read(sequence)
            want = expanded.read(sequence).positions
            assert torch.equal(row.positions.expand_as(want), want)
    assert method in ("full", "snapkv") or int(latents.stored.max()) == budget


def test_the_largest_head_decides_with_reduce_max():
    """reduce="max" takes the largest probability of all heads, query by query."""
    model, shape = Model(1, 9), SHAPES[0]
    latents, _ = pair("h2o", 4, reduce="max", sinks=0, recent=0.0)
    k, v = latents.after_rope(*model.expand(*latents.before_rope(model.latent, model.rope)))
    latents.attend(model.q, k, v, None, shape)
    keys, _ = model.expand(model.latent, model.rope)
    logits = model.q @ keys.transpose(-1, -2) * shape.scale
    p = logits.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    best = p.amax(1).sum(1)[0].topk(4).indices.sort().values
    assert latents.read(0).positions[0].tolist() == best.tolist()


@pytest.mark.parametrize("method", ["h2o", "snapkv", "tova"])
def test_chunks_change_nothing_when_the_plan_waits(method):
    model, shape = Model(2, 20), SHAPES[0]
    options = {"window": 3} if method == "snapkv" else {}
    once, _ = pair(method, 7, between_chunks=False, **options)
    parts, _ = pair(method, 7, between_chunks=False, **options)
    for cache, cuts in ((once, [0, 15]), (parts, [0, 4, 11, 15])):
        for begin, end in [*pairwise(cuts), (15, 16), (16, 17)]:
            q, c, r = (t[:, :, begin:end] for t in (model.q, model.latent, model.rope))
            out = cache.attend(q, *cache.after_rope(*model.expand(*cache.before_rope(c, r))), None, shape)
        cache.out = out
    torch.testing.assert_close(once.out, parts.out, atol=1e-5, rtol=1e-5)
    assert torch.equal(once.read(0).positions, parts.read(0).positions)


def test_pages_hold_latents_and_only_kept_ones():
    model, budget = shared_model("deepseek_v3"), 8
    with mp.compress(model, "h2o", budget, page_slots=8) as cache:
        generate(model, left_padded([40, 33, 25]), 20, cache=cache)
        stats = cache.stats()
        assert most_stored(cache) == budget
        assert [(p.arrays.key_dim, p.arrays.value_dim) for p in cache.pools] == [(12, 4)]
        assert stats.kv_bytes == 2 * 3 * 8 * (12 + 4) * 4  # layers, sequences, slots, numbers, bytes
        kept = [cache.positions(0, s) for s in range(3)]
    assert len({tuple(rows[0]) for rows in kept}) == 3, "each sequence keeps a set of its own"


def test_stored_latents_are_what_is_attended_to():
    """With a narrow codec, a text in one pass and token by token give the same: nothing is seen unrounded."""
    model, prompt = shared_model("deepseek_v3"), left_padded([16])
    logits = []
    for cuts in ([16], list(range(1, 17))):
        with mp.compress(model, "full", codec="bf16") as cache, torch.no_grad():
            begin = 0
            for end in cuts:
                out = model(input_ids=prompt["input_ids"][:, begin:end], cache=cache)
                begin = end
        logits.append(out.logits[:, -1])
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
