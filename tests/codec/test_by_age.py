"""Number formats by age: what a text names, what each tier then holds, and what attention makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.cache import swap
from millpond.cache.entries.due import quantize_due
from millpond.cache.layer.layer_cache import LayerCache
from millpond.codec import Codec, LayerCodecs, codec_named, resolve
from millpond.codec.groups import Coder
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError
from millpond.hf.document import restore_document, save_document
from millpond.kernels.decode_rules import eviction_value
from millpond.kernels.packed.layout import Side
from tests.helpers.codec.layers import DIM, HEADS, KV, SHAPE, decode, feed, make, positions, tokens
from tests.helpers.engine.helpers import greedy
from tests.helpers.hf.families import family, generate, text
from tests.helpers.kernels.libraries import exact_products

THREE = "bf16:20%,int8:20%,int4"
PAGE = 64


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("given", "tiers"),
    [
        (THREE, [("int8", 2000, 0), ("int4", 4000, 0)]),
        ("bf16:12.5% ; kivi4 : 100 ; int2", [("kivi4", 1250, 0), ("int2", 1250, 100)]),
        ("int8:128,int4", [("int8", 0, 0), ("int4", 0, 128)]),
        ("bf16:0.5%,int8+int4", [("int8+int4", 50, 0)]),
    ],
)
def test_what_each_tier_is_stored_as(given: str, tiers: list[tuple[str, int, int]]) -> None:
    found = resolve(given)
    assert isinstance(found, Codec)
    assert [(tier.name, tier.share, tier.residual) for tier in found.ages] == tiers
    assert resolve(found.name) == found


def test_tiers_of_some_layers() -> None:
    found = resolve({"0": "bf16", "*": THREE})
    assert isinstance(found, LayerCodecs)
    assert found.of(0) is torch.bfloat16
    assert found.of(1) == resolve(THREE)
    assert resolve(found.name.replace(",", ";")) is not None


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("bf16:60%,int8:40%,int4", "add up to 100 %"),
        ("bf16:70%,int8:70%,int4", "add up to 140 %"),
        ("bf16:20%,int9:20%,int4", "unknown codec 'int9'; did you mean"),
        ("bf16:20%,int4:20%,int8", "tier 'int8' has 8.4 bits"),
        ("int4:20%,int4", "name the tiers from many bits to few"),
        ("int8:20%,bf16", "may only be the first tier"),
        ("bf16:20%,int8,int4", "'int8' has no size"),
        ("bf16:20%,int8:20%,int4:60%", "takes what the others leave"),
        ("bf16:20%", "takes what the others leave"),
        ("bf16:0%,int4", "above 0 %"),
        ("bf16:1.234%,int4", "to two digits"),
        ("bf16:0,int4", "1 to 1073741824 entries"),
        ("bf16:1.5,int4", "a whole number"),
        ("bf16:-3,int4", "no number of entries"),
        (f"bf16:{'9' * 5000},int4", "no number of entries"),
        ("bf16:\u0663,int4", "no number of entries"),
        (":20%,int4", "unknown codec ''"),
        ("bf16:20%,mikv", "'mikv' is tiered"),
        ("bf16:20%,rotated4", "rotated"),
        ("bf16:20%,kvquant4", "pre_rope"),
        ("bf16:20%,think_kivi2", "prune"),
        ("bf16:20%,int8+int4+int2", "names 3 formats"),
        (",".join(["bf16:1"] * 50 + ["int4"]), "more than 6 tiers"),
    ],
)
def test_what_is_refused(given: str, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        resolve(given)


# ------------------------------------------------------------------ one layer against its definition


def rounded(side: Side, x: Tensor) -> Tensor:
    """Numbers (n, dim) as a page of codes gives them back."""
    coder = Coder(side)
    return coder.decode(coder.encode(x[None]))[0]


@dataclass
class Reference:
    """One head of a cache that keeps everything, as the page on number formats defines it: dequantized numbers."""

    tiers: tuple[Codec, ...]
    plain: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    coded: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coded = [[] for _ in self.tiers]

    def take(self, k: Tensor, v: Tensor) -> None:
        self.plain.append((k.bfloat16().float(), v.bfloat16().float()))

    def age(self) -> None:
        levels = [self.plain, *self.coded]
        held = sum(len(level) for level in levels)
        for number, tier in enumerate(self.tiers):
            upper, lower = levels[number], levels[number + 1]
            behind = sum(len(level) for level in levels[number + 1 :])
            stays = tier.residual + held * tier.share // 10_000
            n = max(min(held - stays - behind, len(upper)), 0) // PAGE * PAGE
            for _ in range(n // PAGE):
                page = [upper.pop(0) for _ in range(PAGE)]
                k, v = (torch.stack(side) for side in zip(*page, strict=True))
                lower += list(zip(rounded(tier.key, k), rounded(tier.value, v), strict=True))

    def all(self) -> tuple[Tensor, Tensor]:
        rows = [row for level in [*reversed(self.coded), self.plain] for row in level]
        k, v = (torch.stack(side) for side in zip(*rows, strict=True))
        return k, v


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries (group, D) over one head's k, v (n, D): what they find (group, D), and their weights (group, n)."""
    p = (q.float() @ k.T * SHAPE.scale).softmax(-1)
    return p @ v, p


@pytest.fixture
def exact() -> Iterator[None]:
    with exact_products():
        yield


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("codec", [THREE, "bf16:40,int8:30%,int4:20%,int2", "int8:10%,int4", "bf16:30%,int4"])
def test_entries_pass_through_the_tiers_as_they_grow_old(codec: str) -> None:
    """Step by step: what each tier holds, bit by bit, and what attention over all of them is."""
    n, prompt = 460, 300
    k_all, v_all = tokens(n)[1:]
    q_all = tokens(n, seed=1)[0]
    storage = resolve(codec)
    assert isinstance(storage, Codec)
    heads, kept = [Reference(storage.ages) for _ in range(KV)], make(codec)
    for t in range(prompt):
        for h, head in enumerate(heads):
            head.take(k_all[0, h, t], v_all[0, h, t])
    for head in heads:
        head.age()
    feed(kept, (q_all, k_all, v_all), 0, prompt)
    for t in range(prompt, n):
        out = feed(kept, (q_all, k_all, v_all), t, t + 1)[0, :, 0].view(KV, -1, DIM)
        for h, head in enumerate(heads):
            head.age()
            head.take(k_all[0, h, t], v_all[0, h, t])
            expected, _ = attention(q_all[0, :, t].view(KV, -1, DIM)[h], *head.all())
            torch.testing.assert_close(out[h], expected, atol=2e-5, rtol=1e-4)
    assert kept.table is not None
    assert [part.live[0].tolist() for part in kept.table.packed_parts] == [
        [len(head.coded[i]) for head in heads] for i in range(len(storage.ages))
    ]
    assert all(head.coded[-1] for head in heads)
    found = kept.read(0)
    for h, head in enumerate(heads):
        k, v = head.all()
        assert torch.equal(found.keys[h].float(), k)
        assert torch.equal(found.values[h].float(), v)
    check(kept)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("method", "options"), [("h2o", {"sinks": 2}), ("tova", {}), ("window", {"sinks": 1})])
def test_a_step_is_attention_over_the_dequantized_entries(method: str, options: dict[str, Any]) -> None:
    """Output, scores, and which entry leaves, of two sequences in turn with pads; what left is in no tier."""
    batch, n, prompt, budget = 2, 520, 360, 330
    qkv, kept = tokens(n, batch, seed=2), make(THREE, method, budget, **options)
    feed(kept, qkv, 0, prompt)
    table = kept.table
    assert table is not None
    group = HEADS // KV
    moved = 0
    for t in range(prompt, n):
        before = [len(part.held()) for part in table.packed_parts]
        quantize_due(table, np.ones(batch, dtype=bool))
        moved += before != [len(part.held()) for part in table.packed_parts]
        held = [kept.read(s) for s in range(batch)]
        out = feed(kept, qkv, t, t + 1)
        after = [kept.read(s) for s in range(batch)]
        scored: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for s, h in ((s, h) for s in range(batch) for h in range(KV)):
            here = held[s].positions[h] >= 0
            k, v = (
                torch.cat([stored[h][here].float(), new[s, h, t : t + 1].bfloat16().float()])
                for stored, new in ((held[s].keys, qkv[1]), (held[s].values, qkv[2]))
            )
            expected, p = attention(qkv[0][s, h * group : (h + 1) * group, t], k, v)
            torch.testing.assert_close(out[s, h * group : (h + 1) * group, 0], expected, atol=2e-5, rtol=1e-4)
            before_it = torch.cat([held[s].scores[h][here], torch.zeros(1)])
            signal = {"h2o": before_it + p.mean(0), "tova": p.mean(0), "window": before_it}[method]
            scored[s, h] = torch.tensor([*held[s].positions[h][here].tolist(), t]), signal
        for s in range(batch):
            at, scores = (torch.stack([scored[s, h][i] for h in range(KV)]) for i in (0, 1))
            rule, query = kept.policy.decode_rule(0), torch.full((KV, 1), t)
            protected = (at < rule.sinks) | (t - at < table.recent[s * KV : s * KV + KV, None])
            value = eviction_value(rule, scores, at, query, KV).masked_fill(protected, torch.inf)
            for h in range(KV):
                now, stays = after[s], after[s].positions[h] >= 0
                gone = set(at[h].tolist()) - set(now.positions[h][stays].tolist())
                assert len(gone) == 1
                leaves = at[h].tolist().index(gone.pop())
                assert value[h, leaves] <= value[h].min() + 1e-6
                kept_scores = torch.cat([scores[h, :leaves], scores[h, leaves + 1 :]])
                torch.testing.assert_close(now.scores[h][stays], kept_scores, atol=1e-5, rtol=1e-4)
    assert moved
    assert table.entries().max() == budget
    for part in table.packed_parts:
        assert part.n_evicted.any() or method == "window"
    check(kept)


def check(kept: LayerCache) -> None:
    """Every page is held by exactly the tables that name it, and tombstones are counted."""
    table = kept.table
    assert table is not None
    table.pool.check_integrity([table.held()])
    for part in table.packed_parts:
        part.pool.check_integrity([part.held()])
        found = part.positions(slice(None))
        used = torch.arange(found.shape[1]) < torch.from_numpy(part.lens)[:, None]
        assert ((found < 0) & used).sum(1).tolist() == part.n_evicted.tolist()
    assert table.entries().tolist() == [[len(h) for h in positions(kept, s)] for s in range(table.n_seq)]


@pytest.mark.parametrize("method", ["full", "h2o"])
def test_how_a_text_is_cut_changes_nothing(method: str) -> None:
    n, budget = 640, 10**6
    qkv = tokens(n)
    whole, cut = make(THREE, method, budget), make(THREE, method, budget)
    feed(whole, qkv, 0, n)
    feed(cut, qkv, 0, 100)
    decode(cut, qkv, 100, 131)
    feed(cut, qkv, 131, 500)
    decode(cut, qkv, 500, n)
    quantize_due(cut.table, np.ones(1, dtype=bool))
    found, expected = cut.read(0), whole.read(0)
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.values, expected.values)


def test_a_fork_keeps_its_tiers() -> None:
    """What one of two caches that share pages decodes changes nothing of the other; both go on as one alone."""
    qkv, alone, kept = tokens(620, seed=4), make(THREE, "h2o", 350), make(THREE, "h2o", 350)
    feed(alone, qkv, 0, 400)
    feed(kept, qkv, 0, 400)
    decode(alone, qkv, 400, 430)
    decode(kept, qkv, 400, 430)
    state, columns, seen = kept.fork(), kept.columns, kept.tracker.seen.copy()
    decode(kept, tokens(620, seed=5), 430, 560)
    kept.restore(state)
    kept.tracker.rewind(columns, seen)
    ours, theirs = decode(kept, qkv, 430, 560), decode(alone, qkv, 430, 560)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    check(kept)


def test_swapping_brings_every_tier_back() -> None:
    qkv, kept = tokens(520, seed=6), make(THREE, "h2o", 380)
    feed(kept, qkv, 0, 420)
    decode(kept, qkv, 420, 460)
    table, before = kept.table, kept.read(0)
    assert table is not None
    content = swap.copy_out(table)
    assert len(content) == 3
    away = swap.release_all(table, content)
    assert all(part.pool.n_live == 0 for part in (table, *table.packed_parts))
    swap.restore(table, away)
    after = kept.read(0)
    assert torch.equal(before.keys, after.keys)
    assert torch.equal(before.scores, after.scores)
    decode(kept, qkv, 460, 520)
    check(kept)


# ------------------------------------------------------------------ models

LENGTH, NEW = 200, 40
SMALL = "bf16:10%,kivi4:30%,kivi2"  # pages of 32


@cache
def model() -> Any:
    return family("llama").make(head_dim=64, hidden_size=128, num_hidden_layers=2, max_position_embeddings=512)


def asked(batch: int = 1) -> dict[str, Tensor]:
    ids = text(batch, LENGTH, seed=3)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def answer(codec: Any, method: str, budget: str | None, batch: int = 1, **more: Any) -> tuple[Tensor, mp.CacheStats]:
    with mp.compress(model(), method, budget, codec) as kept:
        out = generate(model(), asked(batch), NEW, cache=kept, **more)
        kept.check_integrity()
        return out[:, LENGTH:], kept.stats()


@pytest.mark.parametrize(("method", "budget"), [("full", None), ("h2o", "80%"), ("ada", "80%")])
def test_bytes_are_those_of_the_tiers(method: str, budget: str | None) -> None:
    _, stats = answer(SMALL, method, budget)
    for tiers, layer in zip(stats.layer_tier_bytes, stats.layer_kv_bytes, strict=True):
        assert list(tiers) == ["bfloat16", "kivi4", "kivi2"]
        assert all(tiers.values())
        assert sum(tiers.values()) == layer
        for name in ("kivi4", "kivi2"):
            layout = codec_named(name).layout(64, 64)
            assert tiers[name] % layout.page_bytes == 0
    assert sum(stats.layer_kv_bytes) == stats.kv_bytes
    assert stats.layer_formats == [resolve(SMALL).name] * 2
    if method == "full":  # under eviction each tier has half-empty pages of its own
        assert stats.kv_bytes < answer("bf16:10%,kivi4", method, budget)[1].kv_bytes


def test_rows_of_a_batch_are_as_alone() -> None:
    together, _ = answer(SMALL, "h2o", "80%", batch=3)
    ids = asked(3)["input_ids"]
    for row in range(3):
        one = {"input_ids": ids[row : row + 1], "attention_mask": torch.ones(1, LENGTH, dtype=torch.long)}
        with mp.compress(model(), "h2o", "80%", SMALL) as kept:
            assert torch.equal(generate(model(), one, NEW, cache=kept)[0, LENGTH:], together[row])


def test_beams() -> None:
    answer(SMALL, "h2o", "80%", num_beams=3)
    answer(SMALL, "full", None, num_beams=2)


def test_a_document_keeps_its_tiers(tmp_path: Any) -> None:
    ids = asked()["input_ids"]
    with torch.no_grad(), mp.compress(model(), "h2o", "80%", SMALL) as kept:
        model()(ids, cache=kept)
        save_document(kept, ids, tmp_path / "doc.safetensors")
        held, expected = kept.stats().layer_tier_bytes, [model()(ids[:, i : i + 1], cache=kept).logits for i in (0, 1)]
    again, known = restore_document(model(), tmp_path / "doc.safetensors")
    with torch.no_grad(), again:
        assert torch.equal(known, ids)
        assert again.stats().layer_tier_bytes == held
        for i in (0, 1):
            torch.testing.assert_close(model()(ids[:, i : i + 1], cache=again).logits, expected[i], rtol=0, atol=0)


def test_a_budget_in_bytes_holds() -> None:
    for method in ("h2o", "ada"):
        _, stats = answer(SMALL, method, "240kB")
        assert stats.kv_bytes + stats.metadata_bytes <= 240_000
        assert all(all(tiers.values()) for tiers in stats.layer_tier_bytes)


def test_ever_new_sizes_of_tiers_bring_no_new_pools() -> None:
    """Strangers may ask an engine for any sizes: each would take memory of its own for ever."""
    engine = Engine(model(), method="full", kv_memory="8MB")
    ids = tuple(asked()["input_ids"][0].tolist())
    counts = []
    for size in range(20, 24):
        request = Request(
            request_id=str(size), prompt=ids, params=greedy(4), cache=CacheOptions(codec=f"bf16:{size},kivi4:50,kivi2")
        )
        engine.add(request)
        engine.drain()
        engine.check_integrity()
        counts.append(len(engine._parts.memory.pools))
    engine.close()
    assert counts == counts[:1] * 4


def test_the_mean_bits_of_tiers() -> None:
    bits = {name: codec_named(name).bits_per_element(64, 64) for name in ("int8", "int4")}
    found = resolve(THREE)
    assert isinstance(found, Codec)
    assert found.bits_per_element(64, 64) == pytest.approx(0.2 * 16 + 0.2 * bits["int8"] + 0.6 * bits["int4"])
