"""The rotation of a model where it lies in memory, beside the model's own function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millpond.hf.model_profile import ModelProfile
from millpond.hf.signals.rotary import ModelRotation, layer_rotations
from millpond.kernels import decoder_ops
from tests.helpers.hf.families import shared_model

POSITIONS = torch.tensor([[0, 3, 4, 9, 40], [7, 8, 9, 10, 11]])


def rotation_of(family: str) -> ModelRotation:
    found = layer_rotations(ModelProfile.of(shared_model(family)))[0]
    assert found is not None
    return found


def vectors(family: str, dtype: torch.dtype = torch.float32) -> Tensor:
    config = shared_model(family).config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_in_place_it_is_the_models_own(family: str, dtype: torch.dtype, inverse: bool) -> None:
    """Of a batch, with positions that jump; gpt_neox turns a part of each head. What was given stays as it was."""
    rotary, x = rotation_of(family), vectors(family, dtype)
    assert rotary._halves
    before = x.clone()
    own = rotary.rotate(x, POSITIONS, inverse)  # gradients are on: the model's function
    with torch.no_grad():
        found = rotary.rotate(x, POSITIONS, inverse)
        again = rotary.rotate(x, POSITIONS + 1, inverse)
    assert torch.equal(x, before)
    torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again, rotary.rotate(x, POSITIONS + 1, inverse), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(again, found, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_step_turns_each_sequence_as_a_pass_of_its_own(family: str) -> None:
    rotary, x = rotation_of(family), vectors(family)[:, :, :1]
    places = POSITIONS[:, :1] + torch.tensor([[0], [7]])
    found = rotary.rotate(x, places, inverse=True)
    alone = [rotary.rotate(x[n : n + 1], places[n : n + 1], inverse=True) for n in range(2)]
    torch.testing.assert_close(found, torch.cat(alone), atol=0, rtol=0)
    assert not torch.allclose(found[0], rotary.rotate(x[:1], places[1:], inverse=True)[0], atol=1e-3)
    same = rotary.rotate(x, places[:1], inverse=True)  # one row of positions for all
    torch.testing.assert_close(same[:1], alone[0], atol=0, rtol=0)


@torch.no_grad()
def test_positions_of_a_pass_are_turned_into_angles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary, x = rotation_of("llama"), vectors("llama")
    if not decoder_ops.serves(x):
        pytest.skip("native kernels are not used here")
    made = []
    own = ModelRotation._turns
    monkeypatch.setattr(ModelRotation, "_turns", lambda *given: made.append(1) or own(*given))
    rotary._last = None
    for inverse, later in ((True, 0), (True, 0), (False, 0), (False, 1)):
        rotary.rotate(x, POSITIONS + later, inverse)
    assert len(made) == 3


def test_interleaved_heads_are_left_to_the_model() -> None:
    assert not rotation_of("cohere")._halves
