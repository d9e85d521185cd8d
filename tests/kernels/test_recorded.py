"""A layer's decoding step that is recorded and replayed equals one that is launched, whatever changes between steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import millpond as mp
from millpond.errors import OptionError
from millpond.hf.cache import MillpondCache
from millpond.kernels.recorded.decode import RecordedDecode
from millpond.kernels.recorded.record import recording
from tests.helpers.hf.families import generate, left_padded, shared_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def rehearsed(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """As a GPU records: the work is run once before."""
    work()
    return work


def record(cache: MillpondCache) -> list[RecordedDecode]:
    made = [RecordedDecode(rehearsed) for _ in cache.layer_caches]
    for core, one in zip(cache.layer_caches, made, strict=True):
        core.attention.recorded = one
    return made


@pytest.mark.parametrize("method", ["full", "h2o", "snapkv", "ada", "streaming", "tova", "kvmerger", "keydiff"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_generate(method: str, family: str) -> None:
    model, prompt = shared_model(family), left_padded([40, 23])
    budget = None if method == "full" else "40%"
    with mp.compress(model, method, budget) as cache:
        expected = generate(model, prompt, 40, cache=cache)
    with mp.compress(model, method, budget) as cache:
        made = record(cache)
        assert torch.equal(generate(model, prompt, 40, cache=cache), expected)
    assert all(one.replayed > 30 for one in made)
    assert all(one.recorded <= 3 for one in made)


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recording()
    monkeypatch.setenv("MILLPOND_CUDA_GRAPHS", "0")
    assert not recording()
    monkeypatch.setenv("MILLPOND_CUDA_GRAPHS", "yes")
    with pytest.raises(OptionError, match="MILLPOND_CUDA_GRAPHS='yes'"):
        recording()
