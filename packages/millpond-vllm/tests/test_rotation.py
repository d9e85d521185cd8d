"""Rotary positions from a table: as transformers turns heads, back again, and behind the table's end."""

import pytest
import torch
from fed_state import DIM, small_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from millpond import UnsupportedModelError
from millpond_vllm.rotation import HeadRotation


def angles(n, scale=1.0):
    at = torch.arange(n).double()[:, None] / 10000 ** (torch.arange(0, DIM, 2).double() / DIM)
    return (torch.cat([at.cos(), at.sin()], 1) * scale).float()


def heads(n, seed=0):
    return torch.randn(1, 3, n, DIM, generator=torch.Generator().manual_seed(seed))


def test_it_turns_heads_as_transformers_does():
    rotary = small_llama().model.rotary_emb
    at = torch.tensor([[0, 1, 77, 900]])
    cos, sin = rotary(torch.zeros(1), at)
    x = heads(4)
    wanted, _ = apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(HeadRotation(angles(1000), halves=True).rotate(x, at), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_back_again_is_where_it_was(halves, scale):
    rotation, at, x = HeadRotation(angles(500, scale), halves=halves), torch.tensor([[3, 499, 250]]), heads(3)
    torch.testing.assert_close(rotation.rotate(rotation.rotate(x, at), at, inverse=True), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_behind_the_table_it_turns_on(scale):
    short, long = (HeadRotation(angles(n, scale), halves=True) for n in (100, 1000))
    at, x = torch.tensor([[50, 99, 100, 350, 999]]), heads(5)
    torch.testing.assert_close(short.rotate(x, at), long.rotate(x, at), rtol=1e-4, atol=1e-4)


def test_channels_behind_the_table_stay():
    x = torch.randn(1, 2, 3, DIM + 8)
    assert torch.equal(
        HeadRotation(angles(10), halves=True).rotate(x, torch.tensor([[1, 2, 3]]))[..., DIM:], x[..., DIM:]
    )


def turn_by(rotation, shift=0):
    return lambda x, at: rotation.rotate(x.transpose(0, 1)[None], at[None] + shift)[0].transpose(0, 1)


def test_the_model_s_own_module_is_asked():
    table = angles(100)
    own = HeadRotation(table, halves=False)
    assert HeadRotation.probe(table, DIM, turn_by(own), "Rotary", halves=False) is not None
    with pytest.raises(UnsupportedModelError, match="Rotary turns them by more than one"):
        HeadRotation.probe(table, DIM, turn_by(own), "Rotary", halves=True)
    with pytest.raises(UnsupportedModelError, match="use snapkv"):
        HeadRotation.probe(table, DIM, turn_by(own, 1), "Rotary", halves=False)


@pytest.mark.parametrize(
    "table", [torch.zeros(5), torch.zeros(5, 7), torch.zeros(5, DIM + 2), torch.zeros(5, 4).long()]
)
def test_a_table_of_another_kind_is_refused(table):
    with pytest.raises(UnsupportedModelError, match="more than one rotation"):
        HeadRotation.probe(table, DIM, lambda x, at: x, "Rotary", halves=True)
