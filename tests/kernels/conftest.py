"""What the kernel tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from millpond.kernels import native
from millpond.kernels.native import calls, library


@pytest.fixture(params=library.runnable())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each instruction set that this CPU can run."""
    monkeypatch.setenv("MILLPOND_ISA", request.param)
    library.load.cache_clear(), calls.entry_point.cache_clear()
    assert native.isa() == request.param
    yield request.param
    monkeypatch.undo()
    library.load.cache_clear(), calls.entry_point.cache_clear()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
