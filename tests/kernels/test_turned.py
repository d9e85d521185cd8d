"""Keys that are stored before RoPE: the tables of the rotation, and attention that turns keys as it reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.test_packed import TOLERANCE, assert_same
from millpond.errors import OptionError
from millpond.kernels import ops, reference
from millpond.kernels.decode_rules import DecodeRule, Evict, Reduce, Signal
from millpond.kernels.native import library
from millpond.kernels.packed.layout import Format
from tests.helpers.examples import examples
from tests.helpers.kernels.make import Case
from tests.helpers.kernels.packed_make import PackedCase, rope_for, side

needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
pytestmark = pytest.mark.usefixtures("two_threads")

KEYS = [Format.NUQ2, Format.NUQ3, Format.NUQ4, Format.INT4, Format.INT3]
#: Formats whose scales lie in the page.
OF_PAGES = [Format.INT2, Format.INT3, Format.INT4, Format.INT8, Format.FP8]


@st.composite
def cases(draw: st.DrawFn) -> PackedCase:
    n_seq, n_kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    n, dim = n_seq * n_kv_heads, draw(st.sampled_from([32, 64, 80, 128]))
    if draw(st.booleans()):
        key, slots = side(draw(st.sampled_from(KEYS)), True, fixed=True, n_extra=draw(st.sampled_from([0, 7]))), 32
    else:
        slots = draw(st.sampled_from([32, 64]))
        key = side(draw(st.sampled_from(OF_PAGES)), True, draw(st.sampled_from([32, slots])))
    lens = [
        m // slots * slots
        for m in draw(st.lists(st.integers(0, draw(st.sampled_from([64, 900]))), min_size=n, max_size=n))
    ]
    plain = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    dead = draw(st.sampled_from([0, 5]))
    live = [p + m - min(m, dead) for p, m in zip(plain, lens, strict=True)]
    rule = DecodeRule(
        draw(st.sampled_from(Signal)),
        draw(st.sampled_from(Reduce)),
        draw(st.sampled_from([Evict.NEVER, Evict.OLDEST])),
        seed=draw(st.integers(0, 99)),
    )
    case = Case(
        plain,
        n_seq,
        n_kv_heads,
        draw(st.integers(1, 5)),
        dim,
        32,
        16,
        torch.float32,
        4,
        [max(1, m) for m in live],
        rule=rule,
        window=draw(st.sampled_from([0, 50])),
        seed=draw(st.integers(0, 500)),
    )
    rope = rope_for(
        dim,
        1000,
        draw(st.sampled_from([dim, 16])),
        interleaved=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 0.8])),
    )
    return PackedCase(case, lens, key, side(Format.NUQ4), slots, dead, rope=rope, in_order=draw(st.booleans()))


@needs_native
@given(case=cases())
@settings(max_examples=examples(20))
def test_native_equals_reference(case: PackedCase) -> None:
    a = case.build()
    assert_same(a, a.clone())


@needs_native
@given(case=cases())
@settings(max_examples=examples(3), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_instruction_set(isa: str, case: PackedCase) -> None:
    a = case.build()
    assert_same(a, a.clone(), TOLERANCE if isa in ("v4bf16", "v4fma") else 1e-4)


def test_what_is_read_is_what_was_written_turned_and_turned_back() -> None:
    """With a fine format and the outliers exact, keys come back after RoPE as they went in."""
    rope = rope_for(64, 200, 64)
    case = PackedCase(
        Case([0], 1, 1, 1, 64, 32, 16, seed=3),
        [128],
        side(Format.NUQ4, True, fixed=True, n_extra=256),
        side(Format.NUQ4),
        128,
        rope=rope,
    )
    call = case.build()
    found = reference.read_packed(call.packed, 128, 64)
    before = rope.turn_back(call.keys, call.positions)
    stored = rope.turn_back(found[0], found[2])
    assert float((found[0] - call.keys).norm() / call.keys.norm()) < 0.2
    torch.testing.assert_close((stored - before).norm(), (found[0] - call.keys).norm(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.8])
def test_turning_back_undoes_turning_and_dots_tell_distances(interleaved: bool, scale: float) -> None:
    rope = rope_for(32, 100, 16, interleaved=interleaved, scale=scale)
    assert len(rope.pairs) == 8
    q, k = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0))
    p, t = torch.tensor([70]), torch.tensor([40])
    torch.testing.assert_close(rope.turn_back(rope.turn(k, t), t), k)
    far = rope.turn(q, p) @ rope.turn(k, t).T
    near = rope.turn(q, p - 30) @ rope.turn(k, t - 30).T
    torch.testing.assert_close(far, near, rtol=1e-4, atol=1e-4)
    assert torch.equal(rope.turn(k, t)[:, 16:], k[:, 16:])


def test_scales_of_slots_cannot_hold_keys_before_rope() -> None:
    call = PackedCase(Case([3], 1, 1, 1, 32, 32, 16), [64], side(Format.INT4), side(Format.INT4), 64).build()
    call.packed = replace(call.packed, rope=rope_for(32, 99, 32))
    with pytest.raises(OptionError, match="rope= needs scales per channel"):
        call.run(ops)
