"""What the kernel tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from millpond.kernels import native
from millpond.kernels.native import calls, library


@contextmanager
def running(isa: str) -> Iterator[None]:
    """The kernels of one instruction set inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLPOND_ISA", isa)
        library.load.cache_clear(), calls.entry_point.cache_clear()
        assert native.isa() == isa
        yield
    library.load.cache_clear(), calls.entry_point.cache_clear()


@pytest.fixture(params=library.runnable())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this CPU can run."""
    with running(request.param):
        yield request.param


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
