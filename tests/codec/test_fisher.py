"""What weighs the clustering of KVQuant: squared gradients times squared ranges, and Q-Norm's mean and deviation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millpond.codec.nuq import as_table, key_table, kmeans, normalised_keys, normalised_values, q_norm
from millpond.hf.calibration import measure
from millpond.hf.calibration.measure import calibrate
from tests.helpers.hf.families import family, text


def skewed(n: int, seed: int = 0) -> Tensor:
    """Numbers in [-1, 1] whose mean is far from their middle."""
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 4 * 2 - 1


def test_a_number_weighs_its_gradient_times_the_square_of_its_range() -> None:
    """An error of 1 in the normalised number is one of the range in the key: it costs fisher * range^2."""
    generator = torch.Generator().manual_seed(1)
    keys, fisher = torch.randn(64, 3, generator=generator) * torch.tensor([0.5, 2.0, 8.0]), torch.rand(64, 3) + 0.1
    y, weights, scale, _ = normalised_keys(keys, fisher, outliers=0)
    assert len(y) == keys.numel()
    torch.testing.assert_close(weights.view(64, 3), fisher * scale.square())
    alone = normalised_keys(keys, fisher, outliers=0, by_range=False)[1]
    torch.testing.assert_close(alone.view(64, 3), fisher)


def test_a_value_weighs_the_square_of_the_range_of_its_token() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(2, 4, 8, generator=generator) * torch.tensor([0.1, 1.0, 3.0, 9.0])[:, None]
    fisher = torch.rand(2, 4, 8, generator=generator) + 0.1
    _, weights = normalised_values(values, fisher, 0)
    half = (values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)) / 2
    torch.testing.assert_close(weights.view_as(values), fisher * half.square())


def test_numbers_of_large_gradients_are_told_apart_more_finely() -> None:
    """Half of each channel weighs a thousand times as much: its numbers are nearer to the table's."""
    keys = torch.linspace(-1, 1, 512)[:, None]
    fisher = torch.where(keys > 0, 1000.0, 1.0)
    table, scale, zero = key_table(keys, fisher, 3, outliers=0)
    numbers = torch.tensor(table) * scale + zero
    errors = (keys - numbers).abs().amin(1)
    assert float(errors[256:].mean()) < 0.5 * float(errors[:256].mean())
    assert sum(n > 0 for n in table) >= 6


def test_the_gradients_of_the_model_reach_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a calibration are those of its own numbers and weights, for keys and for values."""
    seen = []

    def watched(samples: Tensor, weights: Tensor | None, k: int) -> Tensor:
        seen.append((samples, weights))
        return kmeans(samples, weights, k)

    monkeypatch.setattr(measure, "kmeans", watched)
    model, ids = family("llama").make(head_dim=16), text(1, 400, seed=8)[0]
    with_gradients = calibrate(model, ids, windows=1, length=300, bits=(3,))
    n = len(seen)
    without = calibrate(model, ids, windows=1, length=300, bits=(3,), fisher=False)
    for (y, weights), (same, alike) in zip(seen[:n], seen[n:], strict=True):
        assert weights is not None
        assert alike is not None
        ratio = weights.double() / alike.double() if torch.equal(y, same) else torch.tensor([1.0, 9.0])
        assert float(ratio.max()) > 1.5 * float(ratio.min())  # no constant: gradients differ from number to number
    assert with_gradients.layers[0].keys[3].table != without.layers[0].keys[3].table
    assert with_gradients.layers[0].values[3].table != without.layers[0].values[3].table


def test_the_published_weights_are_the_gradients_alone() -> None:
    model, ids = family("llama").make(head_dim=16), text(1, 400, seed=8)[0]
    tables = [
        calibrate(model, ids, windows=1, length=300, bits=(3,), by_range=by_range).layers[0].keys[3].table
        for by_range in (True, False)
    ]
    assert tables[0] != tables[1]


def test_q_norm_moves_a_skewed_mean_back() -> None:
    """Two bits of skewed numbers, chosen without their mean in mind: the shift and the factor are both needed."""
    y = skewed(20_000)
    table = as_table(torch.linspace(-1, 1, 4))
    numbers = torch.tensor(table, dtype=torch.float64)
    before = numbers[(y[:, None] - numbers).abs().argmin(1)]
    assert abs(float(before.mean() - y.mean())) > 0.02
    moved, cuts = q_norm(table, y)
    read = torch.tensor(moved, dtype=torch.float64)[torch.bucketize(y, torch.tensor(cuts, dtype=torch.float64))]
    assert float(read.mean()) == pytest.approx(float(y.mean()), abs=4e-3)
    assert float(read.std()) == pytest.approx(float(y.std()), rel=1e-2)
