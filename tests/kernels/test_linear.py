"""The product of a few rows with a matrix: right, and the same bits whatever runs beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from millpond.kernels import native
from millpond.kernels.linear import linear
from millpond.kernels.native import library
from tests.helpers.examples import examples

pytestmark = [
    pytest.mark.skipif(not library.runnable(), reason="installed without native kernels"),
    pytest.mark.usefixtures("two_threads"),
]

#: most error of a sum of k products, relative to the sum of their sizes, and of the rounded result
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = st.sampled_from(list(ROUNDING))
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 509, 1024, 2816]))


def draw(m: int, n: int, k: int, dtype: torch.dtype, bias: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    gen = torch.Generator().manual_seed(seed)
    x, w = torch.randn(m, k, generator=gen), torch.randn(n, k, generator=gen)
    return x.to(dtype), w.to(dtype), torch.randn(n, generator=gen).to(dtype) if bias else None


def check(x: Tensor, w: Tensor, b: Tensor | None) -> None:
    found = native.linear(x, w, b)
    wide = None if b is None else b.double()
    expected = torch_linear(x.double(), w.double(), wide)
    size = torch_linear(x.double().abs(), w.double().abs(), None if wide is None else wide.abs())
    assert found.dtype == x.dtype
    least = torch.finfo(x.dtype).tiny * torch.finfo(x.dtype).eps  # the spacing of subnormal numbers
    bound = ROUNDING[x.dtype] * expected.abs() + 1e-6 * size + least
    assert ((found.double() - expected).abs() <= bound).all()


@given(m=st.integers(1, 32), n=st.integers(1, 150), k=WIDTHS, dtype=DTYPES, bias=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=examples(60))
def test_equals_float64(m: int, n: int, k: int, dtype: torch.dtype, bias: bool, seed: int) -> None:
    check(*draw(m, n, k, dtype, bias, seed))


@given(m=st.integers(1, 32), n=st.integers(1, 70), k=WIDTHS, dtype=DTYPES, bias=st.booleans())
@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_instruction_set(isa: str, m: int, n: int, k: int, dtype: torch.dtype, bias: bool) -> None:
    x, w, b = draw(m, n, k, dtype, bias)
    check(x, w, b)
    assert torch.equal(native.linear(x[-1:], w, b), native.linear(x, w, b)[-1:])


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("n", "k"), [(301, 1000), (3, 2816), (1024, 520), (64, 33)])
def test_a_row_of_a_batch_has_the_bits_of_the_row_alone(dtype: torch.dtype, n: int, k: int) -> None:
    x, w, b = draw(32, n, k, dtype, True)
    together = native.linear(x, w, b)
    for m in range(32):
        assert torch.equal(native.linear(x[: m + 1], w, b), together[: m + 1])
        assert torch.equal(native.linear(x[m : m + 1], w, b), together[m : m + 1])


@pytest.mark.parametrize("n_threads", [2, 3, 7, 100])
def test_thread_count_changes_no_bit(n_threads: int) -> None:
    x, w, b = draw(5, 3001, 777, torch.bfloat16, True)
    torch.set_num_threads(1)
    one = native.linear(x, w, b)
    torch.set_num_threads(n_threads)
    for _ in range(5):
        assert torch.equal(native.linear(x, w, b), one)


def test_where_a_row_of_the_matrix_lies_changes_no_bit() -> None:
    x, w, _ = draw(3, 40, 100, torch.bfloat16, False)
    whole = native.linear(x, w)
    for begin in range(1, 38):
        assert torch.equal(native.linear(x, w[begin : begin + 3]), whole[:, begin : begin + 3])


def test_strides() -> None:
    x, w, b = draw(4, 50, 96, torch.bfloat16, True)
    expected = native.linear(x, w, b)
    padded = torch.full((50, 130), float("nan"), dtype=torch.bfloat16)
    padded[:, 17:113] = w
    assert torch.equal(native.linear(x, padded[:, 17:113], b), expected)
    assert torch.equal(native.linear(x.T.contiguous().T, w, b), expected)
    assert torch.equal(native.linear(x.view(2, 1, 2, 96), w, b), expected.view(2, 1, 2, 50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [3, 6, 16])
def test_nan_and_infinity_stay_in_their_row_and_column(m: int, dtype: torch.dtype) -> None:
    x, w, _ = draw(m, 37, 45, dtype, False)
    x[2, 44], w[36, 3] = float("nan"), float("inf")
    found = native.linear(x, w)
    assert torch.equal(found.isnan(), torch.arange(m)[:, None].eq(2).expand(m, 37))
    assert torch.equal(found.isinf().any(0).nonzero().flatten(), torch.tensor([36]))


# ------------------------------------------------------------------------------------------- who does the work


class Spy:
    """Counts the calls of the native function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, real = 0, native.linear

        def linear(*args: Tensor) -> Tensor:
            self.calls += 1
            return real(*args)

        monkeypatch.setattr(native, "linear", linear)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@torch.no_grad()
def test_few_rows_run_native_and_agree_with_torch(spy: Spy) -> None:
    x, w, b = draw(16, 60, 64, torch.float32, True)
    for rows in (x, x[:1], x[0], x.view(4, 4, 64)):
        torch.testing.assert_close(linear(rows, w, b), torch_linear(rows, w, b))
    assert spy.calls == 4


FALLBACKS = {
    "many rows": lambda x, w, b: (x.repeat(3, 1), w, b),
    "no rows": lambda x, w, b: (x[:0], w, b),
    "float64": lambda x, w, b: (x.double(), w.double(), b.double()),
    "weights in columns": lambda x, w, b: (x, w.T.contiguous().T, b),
    "a bias with gaps": lambda x, w, b: (x, w, b.repeat_interleave(2)[::2]),
    "a bias for all": lambda x, w, b: (x, w, b[:1]),
    "a vector for a matrix": lambda x, w, b: (x, w[0], None),
}


@pytest.mark.parametrize("name", FALLBACKS)
@torch.no_grad()
def test_what_does_not_fit_goes_to_torch(name: str, spy: Spy) -> None:
    x, w, b = FALLBACKS[name](*draw(16, 60, 64, torch.float32, True))
    assert torch.equal(linear(x, w, b), torch_linear(x, w, b))
    assert spy.calls == 0


@torch.no_grad()
def test_torch_makes_the_errors(spy: Spy) -> None:
    x, w, b = draw(2, 60, 64, torch.float32, True)
    with pytest.raises(RuntimeError):
        linear(x[:, :63], w, b)
    with pytest.raises(RuntimeError):
        linear(x.half(), w, b)
    assert spy.calls == 0


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_go_to_torch(which: int, spy: Spy) -> None:
    leaves = draw(2, 5, 8, torch.float32, True)
    leaves[which].requires_grad_()
    linear(*leaves).sum().backward()
    assert leaves[which].grad is not None
    assert spy.calls == 0
    with torch.no_grad():
        linear(*leaves)
    assert spy.calls == 1


@torch.no_grad()
def test_autocast_goes_to_torch(spy: Spy) -> None:
    x, w, b = draw(2, 5, 8, torch.float32, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, w, b).dtype == torch.bfloat16
    assert spy.calls == 0


@torch.no_grad()
def test_the_reference_can_be_forced(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_KERNELS", "reference")
    x, w, b = draw(2, 5, 8, torch.float32, True)
    assert torch.equal(linear(x, w, b), torch_linear(x, w, b))
    assert spy.calls == 0


@torch.inference_mode()
def test_inference_mode(spy: Spy) -> None:
    x, w, b = draw(2, 5, 8, torch.float32, True)
    assert linear(x, w, b).is_inference()
    assert spy.calls == 1


# ------------------------------------------------------------------------------------------- torch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(bias: bool) -> None:
    x, w, b = draw(6, 5, 8, torch.bfloat16, bias)
    torch.library.opcheck(torch.ops.millpond.linear.default, (x, w, b))
    torch.library.opcheck(torch.ops.millpond.linear.default, (x.view(2, 3, 8), w, b))


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_compiles_without_graph_breaks() -> None:
    x, w, b = draw(3, 50, 64, torch.bfloat16, True)

    def step(x: Tensor) -> Tensor:
        return linear(x * 2, w, b) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), step(x))
