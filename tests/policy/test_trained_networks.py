"""Products of trained networks: in bfloat16 where features are, row by row the same, and without a whole matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from millpond.kernels.linear import has_products
from millpond.policy.trained.networks import features_of
from millpond_lab.bench.generate.candidates import TINY
from millpond_lab.bench.methods.candidate import random_gates, random_heads

Q, KV, DIM = TINY.heads, TINY.kv_heads, TINY.head_dim
MODEL = TINY.build()


def features(n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    parts = (torch.randn(1, heads, n, DIM, generator=draw).to(torch.bfloat16) for heads in (Q, KV, KV))
    return features_of(*(part.to(dtype) for part in parts))[0]


class Called(TorchDispatchMode):
    """Names of the operators that are called inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_features_of_other_types_are_float32(dtype: torch.dtype) -> None:
    assert features(3, dtype).dtype is torch.float32


@torch.no_grad()
def test_heads_multiply_in_the_type_of_the_features() -> None:
    small, wide = features(40, torch.bfloat16), features(40, torch.float32)
    heads = random_heads(MODEL)
    placed = heads.at(0, small, KV)
    assert placed.w1.dtype is (torch.bfloat16 if has_products(small) else torch.float32)
    assert placed.w2.dtype is heads.at(0, wide, KV).w1.dtype is torch.float32
    found = placed.scores(small)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, heads.at(0, wide, KV).scores(wide), atol=0.01, rtol=0)
    alone = torch.cat([placed.scores(row[None]) for row in small], 1)
    torch.testing.assert_close(alone, found, atol=2e-3, rtol=0)


@torch.no_grad()
def test_gates_multiply_in_the_type_of_the_features() -> None:
    small, wide = features(40, torch.bfloat16), features(40, torch.float32)
    gates = random_gates(MODEL)
    one, other = gates.at(0, small, KV), gates.at(0, wide, KV)
    assert one.wq.dtype is one.w1.dtype is (torch.bfloat16 if has_products(small) else torch.float32)
    found, exact = one.logits(small, *one.take(small)), other.logits(wide, *other.take(wide))
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, exact, atol=0.05, rtol=0)


@torch.no_grad()
def test_a_gate_looks_back_without_the_whole_matrix() -> None:
    """(heads, n, N) floats are 17 GB at 32,766 tokens."""
    x = features(64, torch.float32)
    gate = random_gates(MODEL).at(0, x, KV)
    given = gate.take(x)
    with Called() as called:
        gate.logits(x, *given)
    assert any("flash" in name for name in called.names), called.names
    assert "_softmax" not in called.names
