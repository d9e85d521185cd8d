"""Attention-Gate inside a prompt: outputs and entries against a masked softmax in plain torch, on random gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.errors import OptionError, UnsupportedModelError
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from tests.helpers.hf.families import shared_model
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.fixture import make_layer_cache
from tests.papers.test_attention_gate import ALL, KV, Q, gates_of, policy_of, text, whole_gates

SHAPES = {
    "plain": AttentionShape(0.4),
    "softcap": AttentionShape(0.4, softcap=3.0),
    "window": AttentionShape(0.4, window=9),
    "narrow window": AttentionShape(0.4, window=2),
    "sinks": AttentionShape(0.4, sink_logits=torch.tensor([0.5, 1.0, 2.0, -1.0], dtype=torch.float64)),
}


def masked(parts: tuple[Tensor, Tensor, Tensor], mask: Tensor, shape: AttentionShape) -> Tensor:
    """(Hq, n, D): a_ij = m_ij e^s_ij / sum_j' m_ij' e^s_ij', with mask (KV heads, n, n) bool."""
    q, k, v = (part[0] for part in parts)
    k, v, mask = (t.repeat_interleave(Q // KV, 0) for t in (k, v, mask))
    logits = q @ k.transpose(1, 2) * shape.scale
    if shape.softcap:
        logits = shape.softcap * (logits / shape.softcap).tanh()
    terms = logits.exp() * mask
    total = terms.sum(-1, keepdim=True)
    if shape.sink_logits is not None:
        total = total + shape.sink_logits.exp().view(-1, 1, 1)
    return terms @ v / total


def seen(flags: Tensor, sinks: int, window: int, shape: AttentionShape) -> Tensor:
    """(KV heads, n, n) bool: whether query i sees entry j."""
    at = torch.arange(flags.shape[1])
    distance = at[:, None] - at
    mask = (distance == 0) | (distance < window) | (at < sinks) | flags[:, None]
    return mask & (distance >= 0) & (distance < (shape.window or len(at) + 1))


def flags_of(gates: Any, n: int) -> Tensor:
    """(KV heads, n) bool of `text(n)`, from a cache that keeps everything."""
    cache = make_layer_cache(policy_of(gates, window=n), ALL)
    cache.attend(*text(n), None, AttentionShape(1.0))
    return cache.read(0).scores > 0.5


@pytest.mark.parametrize("passes", [[60], [9, 31, 20], [1, 59]])
@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_attends_according_to_its_flags(name: str, passes: list[int]) -> None:
    """Wherever the passes are cut; and no more is held than is kept, with a window and a chunk."""
    gates, parts, shape = gates_of(), text(60), SHAPES[name]
    flags = flags_of(gates, 60)
    expected = masked(parts, seen(flags, 2, 3, shape), shape)
    cache, outs, begin = make_layer_cache(policy_of(gates, chunk=8), ALL, slots=2), [], 0
    cache.reading = True
    for n in passes:
        outs.append(cache.attend(*(part[:, :, begin : begin + n] for part in parts), None, shape)[0])
        begin += n
        assert int(cache.stored.max()) <= int(flags[:, :begin].sum(1).max()) + 2 + 3 + 8
    cache.run_plans()
    assert torch.allclose(torch.cat(outs, 1), expected, atol=1e-6)
    at = torch.arange(60)
    stays = (flags | (at < 2) | (at >= 57)) & (at >= 60 - (shape.window or 61) + 1)
    for head in range(KV):
        found = [p for p in cache.read(0).positions[head].tolist() if p >= 0]
        assert [p for p in found if p >= int(at[stays[head]].min())] == torch.nonzero(stays[head]).flatten().tolist()
    assert not torch.allclose(expected, masked(parts, seen(torch.ones_like(flags), 2, 3, shape), shape), atol=1e-2) or (
        name == "narrow window"
    )


@pytest.mark.parametrize("window", [0, 1, 12])
def test_a_band_of_any_width(window: int) -> None:
    """Without a window a token still sees itself."""
    gates, parts, shape = gates_of(), text(50), SHAPES["plain"]
    cache = make_layer_cache(policy_of(gates, window=window, sinks=0, chunk=8), ALL)
    out = cache.attend(*parts, None, shape)[0]
    assert torch.allclose(out, masked(parts, seen(flags_of(gates, 50), 0, window, shape), shape), atol=1e-6)


def test_a_global_gate_hides_in_its_one_pass() -> None:
    gates, parts, shape = whole_gates(), text(50), SHAPES["plain"]
    policy = policy_of(gates)
    assert (policy.prefill, policy_of(gates_of()).prefill) == ("once", "chunks")
    out = make_layer_cache(policy, ALL).attend(*parts, None, shape)[0]
    assert torch.allclose(out, masked(parts, seen(flags_of(gates, 50), 2, 3, shape), shape), atol=1e-6)


def test_the_first_tokens_of_a_later_turn_see_all_that_is_stored() -> None:
    """A question stays whole, also where a chunk ends in it; from its 65th token on flags act."""
    gates, parts, shape = gates_of(), text(120), SHAPES["plain"]
    flags, at = flags_of(gates, 120), torch.arange(120)
    cache = make_layer_cache(policy_of(gates, chunk=8), ALL)
    cache.attend(*(part[:, :, :30] for part in parts), None, shape)
    stored, newest = flags | (at < 2), (at >= 27) & (at < 30)
    cache.reading = True
    outs = [
        cache.attend(*(part[:, :, begin : begin + 10] for part in parts), None, shape)[0]
        for begin in range(30, 120, 10)
    ]
    row = at[:, None]
    whole = (row >= 30) & (row < 94) & (at <= row) & ((at >= 30) | (stored | newest)[:, None])
    mask = whole | seen(flags, 2, 3, shape)
    assert torch.allclose(torch.cat(outs, 1), masked(parts, mask, shape)[:, 30:], atol=1e-6)


def test_what_a_floor_keeps_behind_a_chunk_stays_in_sight() -> None:
    gates, parts, shape = gates_of(), text(32), SHAPES["plain"]
    cache = make_layer_cache(policy_of(gates, threshold=1.0, floor=11, chunk=16), ALL)
    cache.reading = True
    first = cache.attend(*(part[:, :, :16] for part in parts), None, shape)[0]
    kept = torch.zeros(KV, 32, dtype=torch.bool)
    for head in range(KV):
        kept[head, [p for p in cache.read(0).positions[head].tolist() if p >= 0]] = True
    assert kept.sum(1).tolist() == [11, 11]
    second = cache.attend(*(part[:, :, 16:] for part in parts), None, shape)[0]
    at, none = torch.arange(32), torch.zeros(KV, 32, dtype=torch.bool)
    mask = seen(none, 2, 3, shape) | ((at[:, None] >= 16) & (at < 13) & kept[:, None])
    assert torch.allclose(torch.cat([first, second], 1), masked(parts, mask, shape), atol=1e-6)


@pytest.mark.parametrize("acts", ["prompt", "end"])
def test_acts_says_whether_the_prompt_is_read_in_full(acts: str) -> None:
    model, (ids, _) = llama(), prompts(1, length=60)
    with torch.no_grad():
        expected = model(ids).logits
        with mp.compress(model, "attention_gate", sinks=1, window=2, acts=acts) as cache:
            found = model(ids, cache=cache).logits
    assert torch.allclose(found, expected, atol=1e-12) is (acts == "end")
    assert torch.allclose(found[:, :3], expected[:, :3], atol=1e-12)


@pytest.mark.parametrize(("family", "chunk"), [("llama", 16), ("gemma2", 256)])
def test_all_gates_open_is_the_plain_model_to_the_bit(family: str, chunk: int) -> None:
    """Also where a prompt is read in several chunks, and by a model with sliding windows."""
    model, ids = shared_model(family), torch.randint(5, 90, (1, 90), generator=torch.Generator().manual_seed(3))
    found = []
    for method, options in (("full", {}), ("attention_gate", {"threshold": 0.0, "chunk": chunk})):
        with torch.no_grad(), mp.compress(model, method, native_layers=False, **options) as cache:
            found.append(model(ids, cache=cache).logits)
    assert torch.equal(*found)


def test_kept_spans_are_seen_inside_the_prompt() -> None:
    gates, parts, shape = gates_of(), text(40), SHAPES["plain"]
    cache = make_layer_cache(policy_of(gates, threshold=1.0, chunk=8), ALL)
    cache.tracker.marks.kept.expect([(10, 14)])
    out = cache.attend(*parts, None, shape)[0]
    at = torch.arange(40)
    mask = seen(((at >= 10) & (at < 14)).expand(KV, -1), 2, 3, shape)
    assert torch.allclose(out, masked(parts, mask, shape), atol=1e-6)


def test_models_where_nothing_may_leave_inside_a_prompt() -> None:
    with pytest.raises(UnsupportedModelError, match="acts='end'"):
        mp.compress(shared_model("deepseek_v3"), "attention_gate")


def test_policies_that_make_no_sense() -> None:
    with pytest.raises(OptionError, match="evicts inside a prompt what its queries still see"):
        replace(METHODS.get("attention_gate")(acts="end"), prefill="chunks")
    with pytest.raises(OptionError, match="chunk=0 must be 1 to 16,777,216"):
        METHODS.get("attention_gate")(chunk=0)
