"""Steps whose kernels rotate queries and new keys: bit for bit what is rotated before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DECODE, DEVICE, INTERPRET, TUNINGS, assert_same_pages, round_to_nearest

# isort: split
from millpond.kernels import gpu, ops
from millpond.kernels.args import DecodeArgs
from millpond.kernels.decode_rules import KEEP_ALL, DecodeRule, Evict, Reduce, Signal
from millpond.kernels.decoder_ops import turned
from millpond.kernels.gpu.new_entry import Turn
from millpond.kernels.packed.layout import Format
from tests.helpers.kernels.make import Call, Case
from tests.helpers.kernels.packed_make import PackedCall, PackedCase, side

if not INTERPRET:
    pytest.skip("these run in the interpreter of Triton only", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter, warns of infinities

BY_SCORE = DecodeRule(Signal.SUM, Reduce.MEAN, Evict.ACC, sinks=2)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    round_to_nearest(monkeypatch)
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")


def angled(args: DecodeArgs, dim: int, dtype: torch.dtype = BF16) -> DecodeArgs:
    """The step with angles of the first `dim` channels."""
    g = torch.Generator().manual_seed(11)
    cos, sin = (torch.randn(len(args.q), dim, generator=g).to(dtype).to(DEVICE) for _ in range(2))
    return replace(args, angles=(cos, sin))


def both(build: Any, dim: int, tuning: Any, dtype: torch.dtype = BF16) -> None:
    """Compare what kernels rotate with what was rotated before."""
    calls = build(), build()
    late = angled(args_of(calls[0]), dim, dtype)
    assert Turn.of(late) is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DECODE, "TUNING", tuning)
        before = turned(angled(args_of(calls[1]), dim, dtype))
        plain = gpu.decode(replace(args_of(build()), angles=None))
        found, want = gpu.decode(late), gpu.decode(before)
    assert not torch.equal(want.out, plain.out)
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one, other)
    left, right = (call.plain if isinstance(call, PackedCall) else call for call in calls)
    assert_same_pages(left.pages, right.pages)
    assert left.lens.tolist() == right.lens.tolist()


def args_of(call: Call | PackedCall) -> DecodeArgs:
    return call.args() if isinstance(call, Call) else call.plain.args(call.packed)


@pytest.mark.parametrize("evict", [Evict.ACC, Evict.NEVER])
@pytest.mark.parametrize("tuning", TUNINGS[1:])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (40, 12)])
def test_kernels_that_rotate(evict: Evict, tuning: Any, dim: int, rotary: int) -> None:
    caps, rule = [20, 90, 40, 40, 1, 5], replace(BY_SCORE, evict=evict)
    case = Case([20, 60, 40, 0, 0, 3], 3, 2, 3, dim, 48, 16, BF16, caps=caps, inactive={1}, rule=rule)
    both(case.build, rotary, tuning)


def test_half_precision() -> None:
    both(Case([20, 60], 1, 2, 3, 64, 48, 16, torch.float16, rule=BY_SCORE).build, 64, TUNINGS[0], torch.float16)


@pytest.mark.parametrize("case", ["float32", "wide angles", "codes", "unscored"])
def test_rows_that_are_rotated_before(case: str) -> None:
    rule = KEEP_ALL if case == "unscored" else BY_SCORE
    plain = Case([20], 1, 1, 3, 64, 48, 16, torch.float32 if case == "float32" else BF16, rule=rule)
    build = PackedCase(plain, [64], side(Format.INT4), side(Format.INT4), 32).build if case == "codes" else plain.build
    dtype = torch.float32 if case == "wide angles" else plain.dtype
    late = angled(args_of(build()), 64, dtype)
    assert Turn.of(late) is None
    want = gpu.decode(turned(angled(args_of(build()), 64, dtype)))
    for one, other in zip(gpu.decode(late), want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kernels", ["reference", "native", "gpu"])
def test_every_set_of_ops_rotates(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_KERNELS", kernels)
    case = Case([20, 60], 1, 2, 3, 64, 48, 16)
    found = ops.decode(angled(case.build().args(), 64, torch.float32))
    want = ops.decode(turned(angled(case.build().args(), 64, torch.float32)))
    assert torch.equal(found.out, want.out)
    assert not torch.equal(found.out, ops.decode(case.build().args()).out)
