"""Switching a model's linear layers and back: the same tokens, and nothing stays behind."""

import pytest
import torch
from torch import nn

import millpond as mp
from millpond.hf.native_layers.linears import use_native_linears
from millpond.kernels import native
from millpond.kernels.linear import FEW_ROWS
from tests.helpers.hf.families import NAMES, family, generate, left_padded, one, shared_model
from tests.helpers.hf.switches import (
    copied_and_pickled,
    gives_back_after_the_last_of_two_users,
    gives_back_when_the_cache_is_forgotten,
)

pytestmark = pytest.mark.skipif(not native.is_available(), reason="installed without native kernels")


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr("millpond.hf.native_layers.linears.MIN_BYTES", 0)


@pytest.fixture
def native_calls(monkeypatch):
    """The shapes of the weights that native calls have read."""
    seen, real = [], native.linear

    def linear(x, weight, bias=None):
        seen.append(tuple(weight.shape))
        return real(x, weight, bias)

    monkeypatch.setattr(native, "linear", linear)
    return seen


def switched(model):
    return [m for m in model.modules() if "forward" in m.__dict__]


def linears(model):
    return [m for m in model.modules() if type(m) is nn.Linear]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_stock(name, native_calls):
    model, prompt = shared_model(name), left_padded([19, 26, 13])
    expected = generate(model, prompt, 8)
    undo = use_native_linears(model)
    assert torch.equal(generate(model, prompt, 8), expected)
    assert bool(native_calls) == bool(linears(model))
    undo()
    assert not switched(model)


@pytest.mark.parametrize("native_layers", [False, True])
def test_compress_switches_them_unless_told_not_to(native_layers, native_calls):
    model = family("gemma2").make()  # whose layers are not passed as a whole
    expected = generate(model, one(15), 8)
    with mp.compress(model, "full", native_layers=native_layers) as cache:
        assert torch.equal(generate(model, one(15), 8, cache=cache), expected)
        assert switched(model) == (linears(model) if native_layers else [])
        assert bool(native_calls) == native_layers
    assert not switched(model)


def test_two_users_of_one_model():
    model = family("llama").make()
    gives_back_after_the_last_of_two_users(model, use_native_linears, switched, linears(model))


def test_a_forgotten_cache_gives_them_back():
    gives_back_when_the_cache_is_forgotten(family("gemma2").make(), switched)


def test_hooks_weights_and_state_dict_go_on():
    layer = nn.Sequential(nn.Linear(8, 3))
    before = layer.state_dict()
    undo = use_native_linears(layer)
    seen = []
    layer[0].register_forward_hook(lambda module, args, out: seen.append(out))
    x = torch.randn(2, 8)
    with torch.no_grad():
        first = layer(x)
        layer[0].weight.mul_(2)
        layer[0].weight = nn.Parameter(layer[0].weight.data.clone())
        second = layer(x)
    assert seen[0] is first
    torch.testing.assert_close(second - layer[0].bias, 2 * (first - layer[0].bias))
    assert list(layer.state_dict()) == list(before)
    undo()
    assert "forward" not in layer[0].__dict__


def test_training_is_untouched(native_calls):
    model, prompt = family("llama").make(), one(12)
    grads = []
    for undo in (lambda: None, use_native_linears(model)):
        model.zero_grad()
        model(**prompt, labels=prompt["input_ids"], use_cache=False).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        undo()
    assert not native_calls
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class Special(nn.Linear):
    """A linear layer that may do anything."""


def test_others_are_left_alone():
    model = nn.ModuleList([Special(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4, device="meta"), nn.Linear(4, 4)])
    model[3].forward = lambda x: x
    undo = use_native_linears(model)
    assert switched(model) == [model[3]]
    undo()
    assert switched(model) == [model[3]]


def test_copies_and_pickles_of_a_switched_model():
    model = nn.Sequential(nn.Linear(8, 3))
    undo = use_native_linears(model)
    twin, loaded = copied_and_pickled(model)
    assert twin[0].forward.__self__ is twin[0]
    undo()
    with torch.no_grad():
        twin[0].weight.zero_()
        x = torch.randn(1, 8)
        assert torch.equal(twin(x)[0], twin[0].bias)
        torch.testing.assert_close(loaded(x), model(x))


def test_moved_away_after_the_switch():
    """Dtype and device are looked at in every call."""
    model = nn.Sequential(nn.Linear(8, 3))
    undo = use_native_linears(model)
    model.double()
    with torch.no_grad():
        assert model(torch.randn(1, 8).double()).dtype == torch.float64
    undo()


def test_many_rows_go_to_torch(native_calls):
    layer = nn.Sequential(nn.Linear(8, 3))
    undo = use_native_linears(layer)
    with torch.no_grad():
        x = torch.randn(FEW_ROWS + 1, 8)
        found = layer(x)
        assert not native_calls
        layer(x[:-1])
        assert len(native_calls) == 1
    undo()
    assert torch.equal(found, nn.functional.linear(x, layer[0].weight, layer[0].bias))


def test_small_weights_stay_with_torch(monkeypatch):
    monkeypatch.setattr("millpond.hf.native_layers.linears.MIN_BYTES", 4 * 64 * 64)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 63))
    undo = use_native_linears(model)
    assert switched(model) == [model[0]]
    undo()
