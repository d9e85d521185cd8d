"""A Triton kernel that a device does not take: the error names it, the device, the reason and what can be done."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DEVICE

# isort: split
import triton
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from millpond.errors import OptionError
from millpond.kernels import gpu
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.kernels.gpu.common import on_its_device


class Refused:
    """A kernel whose launch fails."""

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            raise OutOfResources(240_000, 101_376, "shared memory")

        return launch


def test_the_kernel_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("millpond.kernels.gpu.prefill")
    monkeypatch.setattr(module, "forward", Refused())
    q, k = torch.randn(4, 20, 16, device=DEVICE), torch.randn(2, 20, 16, device=DEVICE)
    args = PrefillArgs(q, k, k, torch.arange(20, dtype=torch.int32, device=DEVICE), AttentionShape(0.25))
    with pytest.raises(OptionError) as told:
        gpu.prefill(args)
    said = str(told.value)
    assert said.startswith("millpond.kernels.gpu.prefill.prefill: its kernel does not compile for ")
    assert "Required: 240000, Hardware limit: 101376" in said
    assert f"with Triton {triton.__version__}" in said
    assert "MILLPOND_KERNELS=reference" in said


def test_other_errors_of_an_op_stay_what_they_are() -> None:
    def fails(tensor: torch.Tensor) -> None:
        raise IndexError("of the op")

    def without_words(tensor: torch.Tensor) -> None:
        raise TritonError

    with pytest.raises(IndexError, match="of the op"):
        on_its_device(fails)(torch.zeros(1, device=DEVICE))
    with pytest.raises(OptionError, match=r"without_words: .* \(TritonError\)"):
        on_its_device(without_words)(torch.zeros(1, device=DEVICE))
