"""The analysis of attention, by hand and on a model whose attention is known."""

from __future__ import annotations

import pytest
import torch

from millpond.errors import DataError
from millpond_lab.train.text.eval import even_columns, gathered, measure_attention, sparsity, spread_windows
from millpond_lab.train.text.recipe import build_text_model
from tests.helpers.train.text_tiny import TINY


def test_gathered_mass_by_hand() -> None:
    curve = gathered(torch.tensor([[1.0, 6.0, 2.0, 1.0]]))[0]
    assert curve[[0, 25, 50, 75, 100]].tolist() == pytest.approx([0.0, 0.6, 0.8, 0.9, 1.0])


def test_even_columns_are_the_column_sums_of_even_attention() -> None:
    even = torch.ones(7, 7).tril()
    even /= even.sum(-1, keepdim=True)
    assert torch.allclose(even.sum(0).double(), even_columns(7))


def test_sparsity_by_hand() -> None:
    weights = torch.tensor([[[1.0, 0, 0], [0.995, 0.005, 0], [0.5, 0.4, 0.1]]])
    assert sparsity(weights).tolist() == pytest.approx([1 / 6])  # the upper triangle is not counted


def test_a_model_that_looks_at_all_alike() -> None:
    model = build_text_model(TINY, 300, seed=0)
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    windows = spread_windows(list(range(200)), 1, 64, 3)
    found = measure_attention(model, windows)
    for share, mass in found.top.items():
        assert mass.shape == (TINY.layers, TINY.heads)
        assert mass.flatten().tolist() == pytest.approx([found.even[share]] * mass.numel(), abs=1e-5)
    assert found.sparsity.max() == 0
    expected = sum(1 / (i + 1) for i in range(1, 64)) / 63
    assert found.first.flatten().tolist() == pytest.approx([expected] * found.first.numel(), abs=1e-5)


def test_windows_are_spread_over_the_document() -> None:
    windows = spread_windows(list(range(100, 200)), 1, 11, 3)
    assert [window[0, :2].tolist() for window in windows] == [[1, 100], [1, 145], [1, 190]]
    assert all(window.shape == (1, 11) for window in windows)
    assert spread_windows(list(range(10)), None, 10, 1)[0].tolist() == [list(range(10))]
    with pytest.raises(DataError, match="too few for 2 windows of 10"):
        spread_windows(list(range(19)), 1, 11, 2)
