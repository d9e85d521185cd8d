"""Products of few rows in Triton against torch's, and who multiplies: on a GPU, else in the interpreter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DEVICE, DTYPES, normal, quick, round_to_nearest, seeds

# isort: split
from millpond.errors import OptionError
from millpond.kernels.decoder_ops import Projection
from millpond.kernels.gpu import few_rows
from millpond.kernels.gpu.dense import FusedDense
from millpond.kernels.quantized_weight import QuantizedWeight

SEVERAL = pytest.mark.parametrize("dtype", DTYPES)
FUSED = FusedDense()


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    round_to_nearest(monkeypatch)
    monkeypatch.setattr(few_rows, "_FASTER", {})
    few_rows._say.cache_clear()
    yield
    few_rows._say.cache_clear()


def exactly(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """In float64, rounded to x's dtype where `multiply` says so."""
    y = x.double() @ weight.double().T
    if bias is not None:
        y += bias.double()
        y = y if residual is None else y.to(x.dtype).double()
    return (y if residual is None else y + residual.double()).to(x.dtype)


def near(got: Tensor, want: Tensor) -> None:
    """Equal but for the order of sums in float32: at most a step of the dtype apart, and few numbers are."""
    assert got.dtype is want.dtype
    assert got.shape == want.shape
    size = float(want.abs().max())
    step = torch.finfo(want.dtype).eps * (32 if want.dtype is torch.float32 else 1)
    torch.testing.assert_close(got, want, rtol=step, atol=step * size / 8)
    if want.dtype is not torch.float32:
        assert int((got == want).sum()) >= 0.9 * got.numel() - 1


@quick
@given(
    rows=st.integers(1, 8),
    n=st.sampled_from([1, 7, 64, 65, 130]),
    k=st.sampled_from([1, 31, 128, 520, 1024, 2051, 3000]),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    adds=st.booleans(),
    gap=st.sampled_from([0, 3]),
    seed=seeds,
)
def test_the_product(
    rows: int, n: int, k: int, dtype: torch.dtype, has_bias: bool, adds: bool, gap: int, seed: int
) -> None:
    """Rows of x, of the matrix and of the residual may lie apart; what lies between is NaN."""
    generator = torch.Generator().manual_seed(seed)

    def apart(count: int, size: int) -> Tensor:
        wide = torch.full((count, size + 2 * gap), torch.nan, dtype=dtype, device=DEVICE)
        wide[:, gap : gap + size] = normal(generator, count, size, dtype=dtype)
        return wide[:, gap : gap + size]

    x, weight = apart(rows, k), apart(n, k)
    bias = normal(generator, n, dtype=dtype) * 9 if has_bias else None
    residual = apart(rows, n) if adds else None
    want = exactly(x, weight, bias, residual)
    found = few_rows.multiply(x, weight, bias, residual)
    near(found, want)
    assert residual is None or found is residual


@SEVERAL
def test_parts_of_a_long_row(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of parts are joined in one order, whatever lies beside a row; a part may be shorter than others."""
    generator = torch.Generator().manual_seed(3)
    x, weight = normal(generator, 5, 4000, dtype=dtype), normal(generator, 90, 4000, dtype=dtype)
    want, found = exactly(x, weight, None, None), []
    for blocks in (1, 3, 8, 1000):
        monkeypatch.setattr(few_rows, "BLOCKS", blocks)
        found.append(few_rows.multiply(x, weight))
        near(found[-1], want)
        assert torch.equal(found[-1], few_rows.multiply(x, weight))
        assert torch.equal(found[-1][2:3], few_rows.multiply(x[2:3], weight))
    if dtype is torch.float32:
        assert not torch.equal(found[1], found[-1])  # so there were parts


def test_x_whose_columns_lie_apart_and_a_row_of_nan() -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = normal(generator, 70, 4).T, normal(generator, 9, 70)
    near(few_rows.multiply(x, weight), exactly(x, weight, None, None))
    x = x.contiguous()
    x[1, 5] = torch.nan
    found = few_rows.multiply(x, weight)
    assert bool(found[1].isnan().all())
    near(found[[0, 2, 3]], exactly(x[[0, 2, 3]], weight, None, None))


# ---------------------------------------------------------------------------------------------- who multiplies


class Clock:
    """Times work that it runs: the kernel's takes `ours`, the other's 1."""

    def __init__(self, patch: pytest.MonkeyPatch, ours: float) -> None:
        self.asked, self.launched, self.ours = 0, 0, ours
        multiply = few_rows.multiply

        def counted(*args: Any) -> Tensor:
            self.launched += 1
            return multiply(*args)

        patch.setattr(few_rows, "multiply", counted)
        patch.setattr(few_rows, "stopwatch", lambda device: self)

    def __call__(self, work: Callable[[], object]) -> float:
        self.asked += 1
        before = self.launched
        work()
        return self.ours if self.launched > before else 1.0

    def launches(self, *args: Any) -> bool:
        """Whether the kernel computes a product, besides its trial."""
        trials, before = self.asked, self.launched
        few_rows.product(*args)
        return self.launched - before == (3 if self.asked > trials else 1)  # a trial runs it twice


def operands(rows: int = 2, n: int = 6, k: int = 64, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return normal(generator, rows, k, dtype=dtype), normal(generator, n, k, dtype=dtype)


@pytest.mark.parametrize(("ours", "wins"), [(0.5, True), (0.94, True), (0.97, False), (2.0, False)])
def test_the_faster_one_multiplies_and_is_remembered(ours: float, wins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, ours)
    for _ in range(3):
        assert clock.launches(*operands()) == wins
    assert clock.asked == 2
    for rows, trials in ((3, 2), (4, 2), (1, 3), (5, 4), (8, 4)):  # up to 1, 2, 4 and 8 rows
        assert clock.launches(*operands(rows)) == wins
        assert clock.asked == 2 * trials
    for other in (operands(n=7), operands(k=65), operands(dtype=torch.bfloat16)):
        before = clock.asked
        assert clock.launches(*other) == wins
        assert clock.asked == before + 2


def test_projections_of_the_decoder_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.5)
    x, weight = operands()
    bias, residual = torch.full((6,), 3.0, device=DEVICE), torch.ones(2, 6, device=DEVICE)
    for part in ((weight, None), (weight, bias)):
        for whole in (None, part):
            before = clock.launched
            (found,) = FUSED.apart(x, Projection((part,), whole))
            near(found, exactly(x, weight, part[1], None))
            assert clock.launched > before
        before, place = clock.launched, residual.clone()
        assert FUSED.added(x, Projection((part,), part), place) is place
        near(place, exactly(x, weight, part[1], residual))
        assert clock.launched > before


def test_a_trial_leaves_operands_and_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, 2.0)
    x, weight = operands()
    x[:] = torch.nan  # a trial has rows of its own
    torch.manual_seed(5)  # another than that of a trial
    residual, state = torch.ones(2, 6, device=DEVICE), torch.get_rng_state()
    few_rows.product(x, weight, None, residual.clone())
    assert torch.equal(torch.get_rng_state(), state)
    few_rows._FASTER.clear()
    x, weight = operands()
    near(few_rows.product(x, weight, None, residual.clone()), exactly(x, weight, None, residual))


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_kernel_that_differs_is_not_used(
    wrong: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(few_rows, "multiply", lambda *args: few_rows.by_torch(*args) * wrong)
    clock = Clock(monkeypatch, 0.5)
    x, weight = operands()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            near(few_rows.product(x, weight), exactly(x, weight, None, None))
    assert (clock.launched, clock.asked) == (1, 0)
    (said,) = caplog.messages
    assert "(2, 64) x (6, 64) of torch.float32 differs by " in said


@pytest.mark.parametrize("error", [OptionError("no such thing"), torch.OutOfMemoryError("no such thing")])
def test_a_kernel_that_does_not_run_is_not_used(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> Tensor:
        raise error

    monkeypatch.setattr(few_rows, "multiply", refuse)
    Clock(monkeypatch, 0.5)
    with caplog.at_level(logging.WARNING):
        for rows in (1, 2, 2):
            x, weight = operands(rows)
            near(few_rows.product(x, weight), exactly(x, weight, None, None))
    (said,) = caplog.messages
    assert said.endswith("no such thing")


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.5)
    x, weight = operands(9)
    assert clock.launches(x[:8], weight)
    clock.launched = 0
    few_rows.product(x, weight)
    few_rows.product(x[:0], weight)
    few_rows.product(x[:2], QuantizedWeight.quantize(weight, 8))
    few_rows.product(x[:2].double(), weight.double())
    few_rows.product(x[:2], weight.T.contiguous().T)  # its rows lie apart
    assert clock.launched == 0


def test_nothing_is_timed_on_a_cpu_nor_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = SimpleNamespace(is_current_stream_capturing=lambda: True)
    assert few_rows.stopwatch(torch.device("cpu")) is None
    assert few_rows.stopwatch(torch.device("cuda"), capturing) is None
    clock = Clock(monkeypatch, 0.5)
    x, weight = operands()
    with monkeypatch.context() as patch:
        patch.setattr(few_rows, "stopwatch", lambda device: None)
        near(few_rows.product(x, weight), exactly(x, weight, None, None))
        assert clock.launched == 0
    assert clock.launches(x, weight)  # it was not taken for slower
    monkeypatch.setattr(few_rows, "stopwatch", lambda device: None)
    assert clock.launches(x, weight)  # what is known is used


class FakeCuda:
    """A device whose n-th work takes the n-th of `times`; it writes down what it is told."""

    def __init__(self, times: list[float]) -> None:
        self.times, self.told, self.now = iter(times), list[str](), 0.0

    is_current_stream_capturing = staticmethod(lambda: False)
    device = staticmethod(lambda device: nullcontext())
    get_device_properties = staticmethod(lambda device: SimpleNamespace(L2_cache_size=64))

    def _sleep(self, cycles: int) -> None:
        self.told.append("sleep")
        self.now += cycles

    def work(self) -> None:
        self.told.append("work")
        self.now += next(self.times)

    def Event(self, enable_timing: bool) -> Any:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.at = cuda, 0.0

    def record(self) -> None:
        self.cuda.told.append("event")
        self.at = self.cuda.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_a_stopwatch_takes_the_median_of_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *size, device, **kwargs: torch.zeros(*size, **kwargs))
    cuda = FakeCuda([90.0, 1.0, 5.0, 4.0, 3.0, 2.0, 80.0])
    watch = few_rows.stopwatch(torch.device("cuda"), cuda)
    assert watch is not None
    assert watch(cuda.work) == 4.0
    assert cuda.told == ["sleep", "event", "work", "event"] * few_rows.REPETITIONS
