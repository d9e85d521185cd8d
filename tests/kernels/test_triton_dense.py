"""The ops between matrix products in Triton against torch's: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DEVICE, DTYPES, normal, round_to_nearest

# isort: split
from millpond.kernels import decoder_ops
from millpond.kernels.decoder_ops import DecoderOps, GatedActivation, Norm, Projection, choose
from millpond.kernels.gpu.common import INTERPRET
from millpond.kernels.gpu.dense import FusedDense
from millpond.runner.packed_model import PackedModel
from tests.models import test_lean

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter, warns of infinities

TORCH, FUSED = DecoderOps(), FusedDense()
SEVERAL = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    round_to_nearest(monkeypatch)


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def near(got: Tensor, want: Tensor) -> None:
    """Equal but for the order of a sum and the exponential: a step of 16 bits apart, a few steps of float32."""
    assert got.dtype is want.dtype
    step = torch.finfo(want.dtype).eps * (16 if want.dtype is torch.float32 else 1)
    torch.testing.assert_close(got, want, rtol=step, atol=step)


def rounded_alike(got: Tensor, want: Tensor) -> None:
    """Numbers of 16 bits were rounded where torch rounds: a sum in another order changes few of them."""
    if want.dtype is not torch.float32:
        assert int((got == want).sum()) > 0.98 * got.numel()


@SEVERAL
@pytest.mark.parametrize("shape", [(1, 960), (17, 64), (3, 9, 48), (2, 1, 128)])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer and bias"])
def test_norm(dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> None:
    generator, dim = drawn(), shape[-1]
    wide = normal(generator, *shape[:-1], dim + 5, dtype=dtype) * 3 + 1
    x = wide[..., 2 : dim + 2]  # rows that lie apart
    bias = normal(generator, dim, dtype=dtype) if kind == "layer and bias" else None
    norm = Norm(normal(generator, dim, dtype=dtype), bias, 1e-5, kind != "rms")
    found = FUSED.norm(x, norm)
    assert found.is_contiguous()
    near(found, TORCH.norm(x, norm))
    rounded_alike(found, TORCH.norm(x, norm))


def test_norm_of_weights_in_another_dtype_and_of_no_rows() -> None:
    x, norm = normal(drawn(), 3, 24, dtype=torch.bfloat16), Norm(torch.ones(24, device=DEVICE), None, 1e-6, False)
    found = FUSED.norm(x, norm)
    assert found.dtype is torch.float32
    assert torch.equal(found, TORCH.norm(x, norm))
    assert FUSED.norm(x[:0].float(), norm).shape == (0, 24)


def test_rows_with_nan_or_infinity_are_their_own() -> None:
    x, norm = normal(drawn(), 4, 40), Norm(torch.ones(40, device=DEVICE), None, 1e-6, False)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    for act in GatedActivation:
        assert torch.equal(FUSED.gated([x], act).isfinite(), TORCH.gated([x], act).isfinite())
    found, want = FUSED.norm(x, norm), TORCH.norm(x, norm)
    assert torch.equal(found.isnan(), want.isnan())
    near(found[[0, 3]], want[[0, 3]])


@pytest.mark.parametrize(("dtype", "angles"), [*((d, d) for d in DTYPES), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize(
    ("n", "heads", "dim", "rotary"),
    [(1, (9, 3), 64, 64), (17, (4, 4), 24, 12), (3, (2, 1), 80, 20), (2, (5, 0), 16, 16)],
)
def test_rotate(dtype: torch.dtype, angles: torch.dtype, n: int, heads: tuple[int, int], dim: int, rotary: int) -> None:
    generator = drawn()
    rows = normal(generator, n, (sum(heads) + 2) * dim, dtype=dtype)  # as a joined matrix gives them
    cos, sin = (normal(generator, n, rotary, dtype=angles) for _ in range(2))
    found, want = rows.clone(), rows.clone()
    for ops, place in ((FUSED, found), (TORCH, want)):
        q, k, _ = torch.split(place.view(n, -1, dim), [*heads, 2], 1)
        ops.rotate_(q, k, cos, sin)
    assert not torch.equal(found, rows)
    assert torch.equal(found, want)


def test_rotate_what_the_kernel_does_not_take() -> None:
    """Heads whose numbers lie apart, keys in another dtype, and no rows."""
    generator = drawn()
    cos, sin = normal(generator, 3, 8), normal(generator, 3, 8)
    q, k = normal(generator, 3, 8, 2).mT, normal(generator, 3, 1, 8, dtype=torch.bfloat16)
    found, want = (q.clone(), k.clone()), (q.clone(), k.clone())
    FUSED.rotate_(*found, cos, sin)
    TORCH.rotate_(*want, cos, sin)
    assert all(map(torch.equal, found, want))
    FUSED.rotate_(q[:0], q[:0], cos[:0], sin[:0])


@SEVERAL
@pytest.mark.parametrize("act", GatedActivation)
@pytest.mark.parametrize(("n", "width"), [(1, 1100), (17, 24)])
@pytest.mark.parametrize("kind", ["one", "joined", "two"])
def test_gate(dtype: torch.dtype, act: GatedActivation, n: int, width: int, kind: str) -> None:
    joined = normal(drawn(), n, 2 * width, dtype=dtype)
    joined[:, :width] *= 4
    parts = list(torch.split(joined, width, -1))
    parts = {"one": parts[:1], "joined": parts, "two": [part.contiguous() for part in parts]}[kind]
    found, want = FUSED.gated(parts, act), TORCH.gated(parts, act)
    assert found.is_contiguous()
    near(found, want)
    if act in (GatedActivation.SILU, GatedActivation.RELU):  # torch's erf and tanh on a CPU are others
        rounded_alike(found, want)


def test_added_takes_the_memory_of_the_residual() -> None:
    generator = drawn()
    x, weight, residual = normal(generator, 3, 8), normal(generator, 6, 8), normal(generator, 3, 6)
    for bias in (None, normal(generator, 6)):
        part = (weight, bias)
        want = TORCH.added(x, Projection((part,), part), residual.clone())
        near(FUSED.added(x, Projection((part,), part), residual.clone()), want)
    place = residual.clone()
    assert FUSED.added(x, Projection(((weight, None),), None), place) is place


class OnGpu:
    """Rows that say they are on a GPU."""

    is_cpu, is_cuda, device = False, True, torch.device("cuda")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __len__(self) -> int:
        return 3


def test_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = {dtype: OnGpu(dtype) for dtype in (*DTYPES, torch.float64)}
    for setting, expected in (("auto", FusedDense), ("gpu", FusedDense), ("reference", DecoderOps)):
        monkeypatch.setenv("MILLPOND_KERNELS", setting)
        assert {type(choose(rows[dtype])) for dtype in DTYPES} == {expected}
        assert type(choose(rows[torch.float64])) is DecoderOps
    monkeypatch.setenv("MILLPOND_KERNELS", "auto")
    monkeypatch.setattr(decoder_ops.importlib.util, "find_spec", lambda name: None)
    assert type(choose(rows[torch.float32])) is DecoderOps
    assert not isinstance(choose(torch.zeros(2, 4)), FusedDense)  # on a CPU


#: Kinds of layers that differ in what is between their products.
KINDS = ("llama", "llama, gelu", "qwen2", "qwen3, tied", "opt", "opt, norms behind", "gpt_neox")


@pytest.mark.skipif(not INTERPRET, reason="on a GPU benchmarks/gpu/run_all.py runs models")
@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), ("llama", torch.bfloat16)])
def test_a_whole_pass(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of layer: the logits are torch's, and the trial of an engine does not refuse the kernels."""
    model, found = test_lean.model_of(kind).to(dtype), []
    ids, rows = torch.arange(1, 8), torch.tensor([0, 3, 6])
    for kernels in ("gpu", "reference"):
        monkeypatch.setenv("MILLPOND_KERNELS", kernels)
        found.append(test_lean.lean_logits(model, ids, rows))
    most = 1e-5 if dtype is torch.float32 else 0.03
    assert (found[0] - found[1]).abs().max() <= most * found[1].abs().max()
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")
    packed = PackedModel(model, runner="lean")
    assert packed._lean is not None
    assert isinstance(packed._lean._decoder.ops(3), FusedDense)
    packed.close()
