"""What the tests of the Triton kernels share; importing it skips them where these cannot run."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.kernels import reference
from millpond.kernels.pages import PageArrays
from tests.helpers.kernels.args import write_args
from tests.helpers.kernels.make import unwritten

pytest.importorskip("triton", reason="Triton is not installed (pip install 'millpond[gpu]')")

from millpond.kernels.gpu.common import INTERPRET
from tests.helpers.examples import examples

if not INTERPRET and not torch.cuda.is_available():
    pytest.skip("no GPU, and Triton was imported before TRITON_INTERPRET=1 was set", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRET else "cuda")
DECODE: Any = importlib.import_module("millpond.kernels.gpu.decode")  # the package shows the function under this name
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: of the output, relative to the largest number in it
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SMALL = DECODE.Tuning(split=32, block=16, warps=4, stages=2, chunk=16)
#: As it is, with small parts, and with small parts whose scores have a kernel of their own.
TUNINGS = (DECODE.TUNING, SMALL, SMALL._replace(whole=0))

quick = settings(
    max_examples=examples(20), derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
seeds = st.integers(0, 2**31)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


def new_pool(
    dtype: torch.dtype, key_dim: int, value_dim: int, slots: int, n_arenas: int, masses: bool = False
) -> PageArrays:
    """Pages full of NaN: what a kernel must never read."""
    pages = PageArrays(4, slots, key_dim, value_dim, dtype, DEVICE, masses)
    for _ in range(n_arenas):
        pages.add_arena()
    return unwritten(pages)


def assert_same_pages(got: PageArrays, want: PageArrays) -> None:
    for name in ("keys", "values", "positions", "log_masses"):
        for a, b in zip(getattr(got, name), getattr(want, name), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    for a, b in zip(got.scores, want.scores, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def ints(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(DEVICE)


def random_table(n_regions: int, width: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Page ids in random order, as a view into a wider table, and the number of arenas of 4 pages that they need."""
    ids = torch.randperm(n_regions * width, generator=generator).view(n_regions, width)
    table = torch.full((n_regions, width + 2), 2**30, dtype=torch.int32)
    table[:, :width] = ids
    return table.to(DEVICE)[:, :width], -(-n_regions * width // 4)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def fill(pages: PageArrays, table: Tensor, lens: Tensor, positions: Tensor, scores: Tensor, g: torch.Generator) -> None:
    n, width = positions.shape
    index = torch.arange(width, dtype=torch.int32, device=DEVICE).expand(n, width)
    keys, values = normal(g, n, width, pages.key_dim), normal(g, n, width, pages.value_dim)
    reference.write(*write_args(pages, table, ints([0] * n), lens, index, keys, values, positions, scores))


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round to bfloat16 as a GPU does: the interpreter cuts off."""
    if not INTERPRET:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    cut = interpreter._convert_float

    def convert(given: Any, of: Any, to: Any, mode: Any) -> Any:
        if (of, to) != (interpreter.tl.float32, interpreter.tl.bfloat16):
            return cut(given, of, to, mode)
        return torch.from_numpy(given.copy()).bfloat16().view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
