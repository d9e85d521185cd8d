"""A layer with a quantized part: what is attended to, what never changes, what comes back to the pool."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from millpond.cache.entries import due, quantize, read_write
from millpond.cache.layer.layer_cache import LayerCache
from millpond.codec import list_codecs, resolve
from millpond.codec.channels import channel_scores, kept_channels, query_balance
from millpond.codec.spec import Codec
from millpond.errors import OptionError, PoolFullError
from tests.helpers.codec.layers import DIM, HEADS, KV, SHAPE, check, codes, decode, feed, make, parts, positions, tokens

CODECS = [name for name in list_codecs() if isinstance(one := resolve(name), Codec) and not one.ages]
KEEPS_ALL = [name for name in CODECS if not name.startswith("mikv")]
NO_TIERS = ["int4", "kivi2", "flexgen4_paper", "fp8", "think", "rotated4", "bf16+int4"]


def attention(cache: LayerCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of one token over what `read` shows and itself; q, k, v (1, heads, 1, DIM)."""
    found = cache.read(0)
    k, v = k.bfloat16(), v.bfloat16()  # as they are stored
    keys = torch.cat([found.keys.float(), k[0].float()], 1).repeat_interleave(HEADS // KV, 0)
    values = torch.cat([found.values.float(), v[0].float()], 1).repeat_interleave(HEADS // KV, 0)
    hidden = torch.nn.functional.pad(found.positions < 0, (0, 1)).repeat_interleave(HEADS // KV, 0)
    logits = (q[0].float() @ keys.transpose(1, 2) * SHAPE.scale).masked_fill(hidden[:, None], -torch.inf)
    return logits.softmax(-1) @ values


@pytest.mark.covering
@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("codec", [*CODECS, "int8+int4", "think:0.5:0.25"])
def test_decoding_attends_to_what_is_read(codec: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused step equals attention over the dequantised entries, at every step, while pages are quantized."""
    monkeypatch.setenv("MILLPOND_KERNELS", kernels)
    steps, bound = (20, 5e-4) if kernels == "reference" else (90, 2e-2)  # native products are of bfloat16
    if "kvquant" in codec and codec.endswith("_paper"):  # of tokens that all heads hold
        cache, qkv = make(codec), tokens(290)
    else:
        cache, qkv = make(codec, "h2o", 180, sinks=1, recent=0.1), tokens(290)
    feed(cache, qkv, 0, 200)
    for t in range(200, 200 + steps):
        due.quantize_due(parts(cache)[0], cache.tracker.seen > 0)
        expected = attention(cache, *(x[:, :, t : t + 1] for x in qkv))
        out = feed(cache, qkv, t, t + 1)
        assert (out[0] - expected).abs().max() < bound, t
    check(cache)
    assert parts(cache)[1].lens.min() > 0


@pytest.mark.covering
@pytest.mark.parametrize("codec", KEEPS_ALL)
def test_sealed_codes_never_change(codec: str) -> None:
    """The codes, and so the error, of the first keys are the same whatever follows."""
    cache, qkv = make(codec), tokens(480)
    feed(cache, qkv, 0, 256)
    first = codes(parts(cache)[1])
    before = cache.read(0).keys[:, :64].clone()
    assert all(len(head) >= 1 for head in first)
    decode(cache, qkv, 256, 400)
    feed(cache, qkv, 400, 480)
    for then, now in zip(first, codes(parts(cache)[1]), strict=True):
        assert torch.equal(then, now[: len(then)])
        assert len(now) > len(then)
    assert torch.equal(cache.read(0).keys[:, :64], before)


@pytest.mark.covering
@pytest.mark.parametrize("codec", ["int4", "kivi2", "flexgen4_paper", "fp8", "think", "rotated2"])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_codes_do_not_depend_on_chunks(codec: str, chunk: int) -> None:
    qkv = tokens(230)
    whole, split = make(codec, between_chunks=False), make(codec, between_chunks=False)
    feed(whole, qkv, 0, 229)
    feed(split, qkv, 0, 29)  # a pass of one token decodes
    for begin in range(29, 229, max(chunk, 2)):
        feed(split, qkv, begin, min(begin + max(chunk, 2), 229))
    for cache in (whole, split):
        feed(cache, qkv, 229, 230)
    assert all(torch.equal(a, b) for a, b in zip(codes(parts(whole)[1]), codes(parts(split)[1]), strict=True))
    assert torch.equal(whole.read(0).keys, split.read(0).keys)


@pytest.mark.parametrize("codec", [*NO_TIERS, "mikv"])
def test_codes_do_not_depend_on_the_batch(codec: str) -> None:
    """Each sequence of a padded batch holds the codes that it would hold alone, and gives the same outputs."""
    qkv = tokens(260, batch=3, seed=4)
    mask = torch.ones(3, 200, dtype=torch.bool)
    mask[1, :37], mask[2, :90] = False, False
    together = make(codec, "h2o", 110, sinks=1)
    feed(together, qkv, 0, 200, mask=mask)
    outs = torch.cat(decode(together, qkv, 200, 260), 2)
    for s, pads in enumerate((0, 37, 90)):
        alone = make(codec, "h2o", 110, sinks=1)
        own = tuple(t[s : s + 1, :, pads:] for t in qkv)
        feed(alone, own, 0, 200 - pads)
        out = torch.cat(decode(alone, own, 200 - pads, 260 - pads), 2)
        assert torch.equal(out[0], outs[s])
        assert positions(alone) == positions(together, s)
        for found, expected in zip(together.read(s)[:3], alone.read(0)[:3], strict=True):
            n = expected.shape[1]
            assert torch.equal(found[:, :n], expected)
            assert (together.read(s).positions[:, n:] == -1).all()


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("codec", ["int4", "kivi2", "flexgen4_paper", "flexgen4", "fp8", "think", "rotated4"])
def test_runs_are_quantized_as_sorted_entries_are(codec: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing leaves, plain entries become codes as they lie: the same codes, and the same entries beside."""
    monkeypatch.setenv("MILLPOND_KERNELS", kernels)
    length = 460 if kernels == "auto" else 280
    qkv, mask = tokens(length, batch=2, seed=3), torch.ones(2, 200, dtype=torch.bool)
    mask[1, :45] = False
    taken: list[bool] = []
    run = due._quantize_run

    def watched(*given: Any) -> bool:
        taken.append(run(*given))
        return taken[-1]

    found = []
    for way in (watched, lambda *given: False):
        monkeypatch.setattr(due, "_quantize_run", way)
        cache = make(codec)
        feed(cache, qkv, 0, 200, mask=mask)
        outs = torch.cat(decode(cache, qkv, 200, length), 2)
        check(cache)
        found.append((outs, codes(parts(cache)[1]), parts(cache)[0].lengths().tolist(), cache.read(1)))
    (outs, seals, lens, read), (outs_, seals_, lens_, read_) = found
    assert all(taken)
    assert len(taken) >= (4 if kernels == "auto" else 1)
    assert torch.equal(outs, outs_)
    assert all(torch.equal(a, b) for a, b in zip(seals, seals_, strict=True))
    assert lens == lens_
    assert all(torch.equal(a, b) for a, b in zip(read[:4], read_[:4], strict=True))


@pytest.mark.parametrize("codec", ["flexgen4", "rotated4"])
def test_entries_in_shared_pages_do_not_move(codec: str) -> None:
    """First entries that stay plain are moved in pages of their own only: a copy goes on as the original does."""
    first, both = tokens(200, seed=5), tokens(330, batch=2, seed=6)
    cache, *alone = make(codec), make(codec), make(codec)
    for one in (cache, *alone):
        feed(one, first, 0, 200)
    cache.select([0, 0])
    cache.tracker.select([0, 0])
    assert not parts(cache)[0].owns(np.arange(2 * KV))
    outs = torch.cat(decode(cache, both, 200, 330), 2)
    check(cache)
    for s, one in enumerate(alone):
        expected = torch.cat(decode(one, tuple(t[s : s + 1] for t in both), 200, 330), 2)
        assert torch.equal(outs[s], expected[0])
        assert torch.equal(cache.read(s).keys, one.read(0).keys)


@pytest.mark.parametrize(("codec", "method"), [("int4", "full"), ("flexgen4_paper", "h2o"), ("kvquant3", "full")])
def test_no_page_falls_due_in_quiet_steps(codec: str, method: str) -> None:
    """While no step has to look, no region holds a page to seal, whatever was read, selected or taken back between."""
    cache, qkv = make(codec, method, 10**6 if method == "full" else 150), tokens(500, batch=3)
    mask = torch.ones(3, 100, dtype=torch.bool)
    mask[2, :70] = False
    feed(cache, qkv, 0, 100, mask=mask)
    quiet = 0
    for t in range(100, 400):
        table, quantized = parts(cache)
        if quantized.steps_until_check > 0:
            quiet += 1
            assert (table.lengths() < due.max_unquantized(quantized, table.entries())).all()
            assert not any(due.pages_due(table, whole=False).values())
        feed(cache, qkv, t, t + 1)
        if t == 200:
            cache.select([2, 0, 1])
            cache.tracker.select([2, 0, 1])
    assert 250 < quiet < 300
    check(cache)


def test_a_swapped_axis_would_be_seen() -> None:
    """At 2 bits keys with a large channel keep most of what they are: the published bound of per-channel groups."""
    cache, qkv = make("kivi2"), tokens(512)
    feed(cache, qkv, 0, 512)
    keys = cache.read(0).keys[:, :256]
    error = (keys - qkv[1][0, :, :256]).norm() / qkv[1][0, :, :256].norm()
    assert 0.05 < error <= 0.45


@pytest.mark.covering
@pytest.mark.parametrize("codec", ["int4", "flexgen4_paper"])
@pytest.mark.parametrize("method", ["h2o", "random", "window", "tova"])
def test_tombstones_are_bounded(codec: str, method: str) -> None:
    """However long a text is decoded, pages of codes hold at most twice what lives in them, and a page."""
    cache, qkv = make(codec, method, 140), tokens(900)
    feed(cache, qkv, 0, 200)
    most = 0
    for t in range(200, 900):
        feed(cache, qkv, t, t + 1)
        table, quantized = parts(cache)
        assert (table.entries() == 140).all()
        assert (quantized.lens <= 2 * (quantized.lens - quantized.n_evicted) + 2 * quantized.slots).all()
        most = max(most, int(quantized.n_evicted.max()))
    check(cache)
    assert most > 0 or (method, codec) == ("h2o", "int4")  # whose quantized entries are all heavy


def test_a_dead_page_goes_back_and_a_living_one_stays() -> None:
    """A page goes when it is mostly dead and the next one is quantized; its survivors are encoded again, no others."""
    cache, qkv = make("flexgen4_paper", "window", 100, sinks=0), tokens(400)
    feed(cache, qkv, 0, 100)
    quantized = parts(cache)[1]
    ids = [quantized.held_by(row).tolist() for row in range(KV)]
    assert [len(own) for own in ids] == [3, 3]
    decode(cache, qkv, 100, 128)  # the oldest 28 have left, and nothing was quantized since
    assert [quantized.held_by(row).tolist() for row in range(KV)] == ids
    assert quantized.n_evicted.tolist() == [28, 28]
    decode(cache, qkv, 128, 130)
    assert [quantized.held_by(row).tolist()[:2] for row in range(KV)] == [own[1:] for own in ids]
    assert positions(cache) == [list(range(30, 130))] * KV
    check(cache)


def test_heads_of_their_own_length_hold_pages_of_their_own() -> None:
    """Ada's short heads return pages of codes too: each head holds the pages that its share needs, and no more."""
    cache, qkv = make("flexgen4_paper", "ada", 160, score="h2o/recent=0.1", every=0, alpha=0.0), tokens(600)
    q, k, v = qkv
    q[:, :2, :, 5], k[:, 0, :20, 5] = 10.0, 10.0  # one head looks at 20 entries
    feed(cache, (q, k, v), 0, 600)
    table, quantized = parts(cache)
    lengths = table.entries()[0]
    assert lengths.sum() == 320
    assert lengths.max() - lengths.min() > 64
    assert [len(quantized.held_by(row)) for row in range(KV)] == [int(n) // 32 for n in lengths]
    assert quantized.pool.n_live == sum(int(n) // 32 for n in lengths)


@pytest.mark.parametrize("codec", ["int4", "int8:40,int4"])
def test_where_plain_entries_find_no_room_nothing_becomes_codes(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, qkv = make(codec), tokens(430)
    feed(cache, qkv, 0, 300)
    table = cache.table
    assert table is not None
    assert table.quantized is not None
    before = positions(cache), [(part.lens.tolist(), part.pool.n_live) for part in table.packed_parts]
    assert sum(sum(lens) for lens, _ in before[1]) > 0
    monkeypatch.setattr(quantize, "write_fresh_pages", Mock(side_effect=PoolFullError("full")))
    with pytest.raises(PoolFullError):
        feed(cache, qkv, 300, 430)
    assert (positions(cache), [(part.lens.tolist(), part.pool.n_live) for part in table.packed_parts]) == before


@pytest.mark.parametrize("codec", ["int4", "kivi2", "fp8", "int8:40,int4"])
def test_the_first_codes_of_a_short_head_lie_beside_older_ones_of_another(codec: str) -> None:
    """They take slots that another head had in use before: what leaves there is not these."""
    cache, qkv = make(codec), tokens(600)
    feed(cache, qkv, 0, 300)
    table, quantized = cache.table, None if cache.table is None else cache.table.quantized
    assert table is not None
    assert quantized is not None
    entries = read_write.read(table, 0)
    keep = entries.positions >= 0
    keep[1] &= entries.positions[1] >= 290  # its codes all leave
    read_write.replace(table, 0, entries, keep)
    widths = [quantized.positions(slice(row, row + 1)).ge(0).sum().item() for row in range(KV)]
    assert widths[0] > widths[1] == 0
    feed(cache, qkv, 300, 600)
    assert quantized.positions(slice(1, 2)).ge(0).any()
    assert [sorted(head) for head in positions(cache)] == [[*range(600)], [*range(290, 600)]]


@pytest.mark.parametrize("codec", ["int4", "flexgen4", "think", "int8:40,int4"])
@pytest.mark.parametrize("turn", ["fresh", "fresh, all alike", "later"])
def test_what_the_host_counts_becomes_what_masks_choose(codec: str, turn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same codes of the same entries, with counts of the host, with those of the device, and by masks."""

    def by_masks(table: Any, part: Any, sequence: int, entries: Any, keep: Any, counts: Any, *, seal: bool) -> None:
        here = entries.positions >= 0
        if not entries.n_quantized:
            part.forget(sequence)
        quantize._replace_some(table, part, sequence, entries, here, here if keep is None else keep, seal=seal)

    found, qkv = [], tokens(400)
    for way in ("host", "device", "masks"):
        cache = make(codec)
        feed(cache, qkv, 0, 300)
        table = cache.table
        assert table is not None
        entries = read_write.read(table, 0)
        order, keep = torch.randperm(entries.positions.shape[1], generator=torch.Generator().manual_seed(1)), None
        if turn == "later":
            new = torch.arange(300, 400, dtype=torch.int32)
            entries = read_write.join(entries, *(t[0, :, 300:].bfloat16().float() for t in qkv[1:]), new)
        else:  # as after a merge, in any order
            entries = entries._replace(n_quantized=0, **{t: getattr(entries, t)[:, order] for t in entries._fields[:4]})
            keep = (entries.positions >= 0) & (entries.positions % 7 > 0)
            keep[1] &= (entries.positions[1] % 5 > 0) | (turn != "fresh")
        kept = entries.positions >= 0 if keep is None else keep
        with monkeypatch.context() as patch:
            if way == "masks":
                patch.setattr(quantize, "_replace_plain", by_masks)
            counts = kept.sum(1).numpy() if way == "host" else None
            quantize.replace(table, 0, entries, keep, seal=True, counts=counts)
        for part in table.packed_parts:
            part.pool.check_integrity([part.held()])
        assert table.packed_parts[0].lens.all()
        read = read_write.in_order(read_write.read(table, 0))[:4]
        found.append((table.lengths().tolist(), [part.lens.tolist() for part in table.packed_parts], read))
    for lengths, lens, read in found[1:]:
        assert (lengths, lens) == found[0][:2]
        for mine, other in zip(read, found[0][2], strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("codec", ["int4", "kivi2", "fp8"])
def test_a_later_plan_leaves_codes_alone(codec: str) -> None:
    """What a second turn keeps of the quantized entries is what it was, unless its page had mostly died."""
    cache, qkv = make(codec, "h2o", 220, sinks=1), tokens(500)
    feed(cache, qkv, 0, 400)
    before = cache.read(0)
    old = parts(cache)[1].positions(slice(None))
    feed(cache, qkv, 400, 420)
    after = cache.read(0)
    table, quantized = parts(cache)
    assert (table.entries() == 220).all()
    kept = quantized.positions(slice(None))
    shared = [set(a.tolist()) & set(b.tolist()) - {-1} for a, b in zip(old, kept, strict=True)]
    assert min(map(len, shared)) > 20
    for head, own in enumerate(shared):
        for position in sorted(own):
            here, there = (d.positions[head].tolist().index(position) for d in (before, after))
            assert torch.equal(before.keys[head, here], after.keys[head, there])
    check(cache)


def test_channels_are_those_of_the_whole_prompt() -> None:
    """ThinK drops the channels that its formula names, the same ones whatever the chunks, and its pages are smaller."""
    q, k, v = tokens(200)
    for chunk in (200, 23):
        cache = make("think", between_chunks=False)
        for begin in range(0, 200, chunk):
            feed(cache, (q, k, v), begin, min(begin + chunk, 200))
        decode(cache, tokens(201, seed=9), 200, 201)
        expected = kept_channels(channel_scores(q[0, :, -32:], k[0]), 0.4)
        regions = parts(cache)[1].regions()
        assert regions.channels is not None
        assert regions.channels.tolist() == expected.tolist()
        assert regions.pages.layout.key_dim == 48
        keys = cache.read(0).keys[:, :160]
        dropped = torch.ones(KV, DIM).scatter(1, expected.long(), 0.0).bool()
        assert (keys.transpose(1, 2)[dropped] == 0).all()


def test_channels_of_a_prompt_read_token_by_token() -> None:
    """Greedy prefill decodes its prompt, and still the whole prompt says which channels stay."""
    q, k, v = tokens(200)
    cache = make("think", "h2o", 90, prefill="greedy")
    feed(cache, (q, k, v), 0, 200)
    regions = parts(cache)[1].regions()
    assert regions.channels is not None
    assert regions.channels.tolist() == kept_channels(channel_scores(q[0, :, -32:], k[0]), 0.4).tolist()
    check(cache)


def test_balance_is_that_of_the_prompt() -> None:
    q, k, v = tokens(200)
    cache = make("mikv", "snapkv", 100)
    feed(cache, (q, k, v), 0, 200)
    balance = parts(cache)[1].regions().balance
    assert balance is not None
    assert torch.allclose(balance, query_balance(q[0], k[0]))


def test_rotated_entries_are_read_as_they_came() -> None:
    for codec, most in (("rotated4", 0.12), ("rotated3", 0.2)):
        cache, qkv = make(codec), tokens(128)
        feed(cache, qkv, 0, 128)
        found = cache.read(0)
        assert ((found.keys - qkv[1][0]).norm() / qkv[1][0].norm()) < most
        assert ((found.values - qkv[2][0]).norm() / qkv[2][0].norm()) < most


@pytest.mark.parametrize(
    ("method", "codec", "options", "reason"),
    [
        ("streaming", "int4", {}, "positions='absolute'"),
        ("d2o", "int4", {}, "sealed group"),
        ("full", "mikv", {}, "evicts nothing"),
        ("ada", "mikv", {"score": "h2o"}, "every=0"),
        ("fastgen", "mikv", {}, "for good"),
        ("expected_attention", "rotated4", {}, "Hadamard"),
    ],
)
def test_impossible_compositions_are_refused(method: str, codec: str, options: dict[str, str], reason: str) -> None:
    from millpond.methods import METHODS

    found = resolve(codec)
    assert isinstance(found, Codec)
    with pytest.raises(OptionError, match=reason):
        METHODS.get(method)(**options).check_codec(found)
