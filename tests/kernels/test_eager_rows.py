"""Copies of rows: those of torch's indexing, for every dtype, width and layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from millpond.kernels.eager.pages import put_rows, take_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.int64)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 3, 8), (9, 5), (9, 1), (9,), (9, 0)])
@pytest.mark.parametrize("turned", [False, True])
def test_rows_are_those_of_an_index(dtype: torch.dtype, shape: tuple[int, ...], turned: bool) -> None:
    source = draw(*shape, dtype=dtype)
    if turned and source.ndim == 3:
        source = source.transpose(1, 2)
    rows = np.array([4, 0, 8, 4])
    found = take_rows(source, rows)
    assert torch.equal(found, source[torch.from_numpy(rows)])
    found.zero_()
    assert torch.equal(source, source.clone())  # a copy

    target, other = source.clone(), draw(*source.shape, dtype=dtype) + 1
    expected = target.clone()
    expected[torch.tensor([7, 1])] = other[torch.tensor([2, 6])]
    put_rows(target, np.array([7, 1], dtype=np.int32), other, np.array([2, 6]))
    assert torch.equal(target, expected)
    put_rows(target, np.array([3, 5]), other[:2])
    expected[torch.tensor([3, 5])] = other[:2]
    assert torch.equal(target, expected)


def test_bytes_that_lie_at_an_odd_place_and_no_rows() -> None:
    memory = torch.arange(65, dtype=torch.uint8)
    source = memory[1:].view(8, 8)
    assert torch.equal(take_rows(source, np.array([2, 3])), source[2:4])
    assert take_rows(source, np.zeros(0, dtype=np.int64)).shape == (0, 8)
    put_rows(source, np.zeros(0, dtype=np.int64), source[:0])
    assert torch.equal(memory, torch.arange(65, dtype=torch.uint8))
