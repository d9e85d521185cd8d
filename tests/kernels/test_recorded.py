"""A layer's decoding step that is recorded and replayed equals one that is launched, whatever changes between steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import millpond as mp
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.ref_counted_pool import arena_bytes_on
from millpond.errors import OptionError
from millpond.hf.cache import MillpondCache
from millpond.kernels.cuda_graphs import RecordedDecode, recording
from millpond.kernels.pages import PageArrays
from tests.helpers.hf.families import generate, left_padded, shared_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def rehearsed(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """As a GPU records: the work is run once before."""
    work()
    return work


def record(cache: MillpondCache) -> list[RecordedDecode]:
    made = [RecordedDecode(rehearsed) for _ in cache.layer_caches]
    for layer_cache, one in zip(cache.layer_caches, made, strict=True):
        layer_cache.attention.recorded = one
    return made


@pytest.mark.covering
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


def test_the_addresses_of_arenas_stay_where_they_are_on_a_device() -> None:
    pages = PageArrays(4, 16, 8, 8, torch.float32, torch.device("meta"))
    pages.add_arena()
    first = pages.bases
    assert first.shape == (5, 64)
    for _ in range(63):
        pages.add_arena()
    assert pages.bases is first
    pages.add_arena()
    assert pages.bases.shape == (5, 128)
    here = PageArrays(4, 16, 8, 8, torch.float32, torch.device("cpu"))
    here.add_arena()
    assert here.bases.shape == (5, 1)
    assert here.nbytes == 4 * 16 * (2 * 8 * 4 + 8)


def test_arenas_are_larger_on_a_device() -> None:
    assert arena_bytes_on(torch.device("cpu"), None) == 8 << 20
    assert arena_bytes_on(torch.device("meta"), None) == 64 << 20
    assert arena_bytes_on(torch.device("meta"), MemoryLimit(64 << 20)) == 1 << 20
