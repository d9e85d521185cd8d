"""The kernels of one instruction set, whichever runs by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from millpond.kernels import native
from millpond.kernels.native import library, structs


@contextmanager
def running(isa: str) -> Iterator[None]:
    """The kernels of one instruction set inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLPOND_ISA", isa)
        library.load.cache_clear(), structs.entry_point.cache_clear()
        assert native.isa() == isa
        yield
    library.load.cache_clear(), structs.entry_point.cache_clear()


@contextmanager
def exact_products() -> Iterator[None]:
    """Kernels that round nothing that is multiplied with codes, on a CPU whose best ones do."""
    rounds = native.is_available() and native.isa() in ("v4bf16", "v4fma")
    if rounds and "v4" not in library.runnable():
        pytest.skip("built for this processor alone, whose products round (make install ISAS=all builds the others)")
    with running("v4") if rounds else nullcontext():
        yield
