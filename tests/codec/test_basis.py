"""Basis in which layers store numbers: attention is the same in it, and what comes back is what went in."""

from __future__ import annotations

import pytest
import torch

from millpond.codec.basis import LEVEL, Basis, scales_for


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_attention_is_the_same(hadamard: bool, scaled: bool, lead: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(*lead, heads, 5, 16, generator=g) for heads in (6, 2, 2))
    bias = torch.zeros(2, 16)
    bias[0, 3], bias[1, 7] = 100.0, -30.0
    basis = Basis(hadamard, scales_for(bias) if scaled else None)
    new_q, new_k, new_v = basis.stored(q, k, v)
    per_head = k.repeat_interleave(3, -3), new_k.repeat_interleave(3, -3)
    before, after = q @ per_head[0].mT, new_q @ per_head[1].mT
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(basis.keys_back(new_k), k)
    torch.testing.assert_close(basis.values(new_v), v)


def test_scales_bring_biases_to_their_level_and_lose_no_bit() -> None:
    bias = torch.tensor([[0.5, -13.0, 200.0, 12.0], [0.0, 0.0, 0.0, 0.0]])
    found = scales_for(bias)
    assert found is not None
    assert found.tolist() == [[1.0, 2.0, 32.0, 1.0], [1.0] * 4]
    assert bool((bias.abs() / found <= LEVEL).all())
    keys = torch.randn(2, 9, 4).bfloat16()
    basis = Basis(False, found)
    assert torch.equal(basis.keys_back(basis.keys(keys)), keys)
    assert scales_for(bias.clamp(-12, 12)) is None


def test_channels_that_turn_together_have_one_scale() -> None:
    bias = torch.tensor([[100.0, 0.0, 3.0, 0.0]])
    found = scales_for(bias, torch.tensor([2, -1, 0, -1]))
    assert found is not None
    assert found.tolist() == [[16.0, 1.0, 16.0, 1.0]]
