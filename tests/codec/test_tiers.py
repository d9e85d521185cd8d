"""MiKV: what a method would evict goes to a lower tier; without that tier it is the method itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from millpond.codec import codec_named
from millpond.codec.channels import query_balance
from millpond.kernels.packed import codes
from tests.helpers.codec.layers import HEADS, KV, SHAPE, check, decode, feed, make, parts, positions, tokens

METHODS: dict[str, dict[str, Any]] = {
    "h2o": {"sinks": 2},
    "snapkv": {"window": 8},
    "ada": {"score": "h2o", "every": 0},
    "tova": {},
    "window": {"sinks": 1},
    "knorm": {},
}


@pytest.mark.parametrize("method", METHODS)
def test_the_upper_tier_is_the_method(method: str) -> None:
    """After the prompt the plain entries are those that the method keeps, as they came; all others lie below."""
    qkv = tokens(300)
    tiers, alone = make("mikv", method, 100, **METHODS[method]), make("bf16", method, 100, **METHODS[method])
    assert torch.equal(feed(tiers, qkv, 0, 300), feed(alone, qkv, 0, 300))
    table, quantized = parts(tiers)
    below = [set(row.tolist()) - {-1} for row in quantized.positions(slice(None))]
    above = [set(own) for own in positions(alone)]
    assert [a | b for a, b in zip(above, below, strict=True)] == [set(range(300))] * 2
    assert not any(a & b for a, b in zip(above, below, strict=True))
    assert table.lengths().tolist() == alone.stored.tolist()
    check(tiers)
    quantized.clear()  # without the lower tier
    found, expected = tiers.read(0), alone.read(0)
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.scores, expected.scores)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_ever_lost(method: str) -> None:
    """While decoding and in later turns every token is in one of the tiers; the upper one stays near its budget."""
    qkv, cache = tokens(420), make("mikv", method, 100, **METHODS[method])
    feed(cache, qkv, 0, 200)
    decode(cache, qkv, 200, 300)
    feed(cache, qkv, 300, 330)
    decode(cache, qkv, 330, 420)
    assert positions(cache) == [list(range(420))] * 2
    table, quantized = parts(cache)
    grows = method in ("snapkv", "knorm")  # these evict nothing while decoding
    assert table.lengths().max() < (100 + 90 + 1 if grows else 160)
    assert quantized.n_evicted.sum() == 0
    check(cache)


def test_demoted_entries_are_the_lowest() -> None:
    """A page's worth of entries goes at once: those that gathered least, of what the newest ones leave."""
    qkv, cache = tokens(320), make("mikv", "h2o", 100, sinks=2)
    feed(cache, qkv, 0, 200)
    decode(cache, qkv, 200, 231)
    table, quantized = parts(cache)
    assert table.lengths().tolist() == [[131, 131]]
    table_before = cache.read(0)
    plain = [set(own) for own in positions(cache)]
    below = [set(row.tolist()) - {-1} for row in quantized.positions(slice(None))]
    decode(cache, qkv, 231, 232)
    assert table.lengths().tolist() == [[100, 100]]
    now = [set(row.tolist()) - {-1} for row in quantized.positions(slice(None))]
    for head, (old, new) in enumerate(zip(below, now, strict=True)):
        gone = new - old
        assert len(gone) == 32
        assert gone < plain[head]
        assert not gone & ({0, 1} | set(range(182, 232)))
        scores = dict(zip(table_before.positions[head].tolist(), table_before.scores[head].tolist(), strict=True))
        stays = plain[head] - old - gone - set(range(180, 232)) - {0, 1}
        assert max(scores[p] for p in gone) <= min(scores[p] for p in stays) + 0.5


@pytest.mark.parametrize("codec", ["int8_mikv", "int8_mikv4"])
@pytest.mark.parametrize("method", ["h2o", "ada", "knorm"])
def test_an_upper_tier_of_eight_bits(method: str, codec: str) -> None:
    """It holds what the method keeps, near to the numbers, and every other token is below it; plain pages gather."""
    qkv, cache = tokens(420), make(codec, method, 100, **METHODS[method])
    alone = make("bf16", method, 100, **METHODS[method])
    feed(cache, qkv, 0, 300)
    feed(alone, qkv, 0, 300)
    table = cache.table
    assert table is not None
    upper, lower = table.packed_parts
    assert not table.lengths().any()
    above = [set(row.tolist()) - {-1} for row in upper.positions(slice(None))]
    below = [set(row.tolist()) - {-1} for row in lower.positions(slice(None))]
    assert above == [set(own) for own in positions(alone)]
    assert [a | b for a, b in zip(above, below, strict=True)] == [set(range(300))] * 2
    assert not any(a & b for a, b in zip(above, below, strict=True))
    regions = lower.regions()
    assert regions.balance is not None
    assert torch.allclose(regions.balance, query_balance(qkv[0][0, :, :300], qkv[1][0, :, :300]))
    for t in range(300, 420):
        found = cache.read(0)
        expected = attention(found, *(x[:, :, t : t + 1] for x in qkv))
        out = feed(cache, qkv, t, t + 1)
        assert (out[0] - expected).abs().max() < 2e-2, t
        for holder in (table, upper, lower):
            holder.pool.check_integrity([holder.held()])
    assert positions(cache) == [list(range(420))] * 2
    kept, side = upper.read(0), codec_named("int8").value
    for head in range(2):
        rows = kept.positions[head] >= 0
        numbers = qkv[1][0, head, kept.positions[head][rows].long()].bfloat16().float()
        once = codes.decode(codes.encode(numbers[None], side), side)[0]
        assert (kept.keys[head][rows] == once).float().mean() > 0.999  # whatever was encoded again
    if method != "knorm":
        assert table.budgeted().max() < 100 + 60
        assert upper.n_evicted.max() < 64


def attention(found: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention of one token over what `read` shows and itself; q, k, v (1, heads, 1, DIM)."""
    group, k, v = HEADS // KV, k.bfloat16(), v.bfloat16()
    keys = torch.cat([found.keys.float(), k[0].float()], 1).repeat_interleave(group, 0)
    values = torch.cat([found.values.float(), v[0].float()], 1).repeat_interleave(group, 0)
    hidden = torch.nn.functional.pad(found.positions < 0, (0, 1)).repeat_interleave(group, 0)
    logits = (q[0].float() @ keys.transpose(1, 2) * SHAPE.scale).masked_fill(hidden[:, None], -torch.inf)
    return logits.softmax(-1) @ values


def test_a_lower_tier_costs_its_bits() -> None:
    """The published setting: a fifth of the entries in 16 bits and the others in two take 5 bits per number at 128."""
    quantized = parts_of_width(128)
    assert 0.2 * 16 + 0.8 * quantized == pytest.approx(5.0)


def parts_of_width(dim: int) -> float:
    from millpond.codec import codec_named

    return codec_named("mikv").bits_per_element(dim, dim)
