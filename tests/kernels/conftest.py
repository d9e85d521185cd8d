"""What the kernel tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from millpond.kernels.native import library
from tests.helpers.kernels.libraries import running


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
