"""A layer's decoding step that is recorded and replayed equals one that is launched, whatever changes between steps."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import millpond as mp
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.ref_counted_pool import arena_bytes_on
from millpond.errors import OptionError
from millpond.hf.cache import MillpondCache
from millpond.kernels import cuda_graphs
from millpond.kernels.cuda_graphs import RecordedDecode, recording, roomy
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
    assert first.shape == (5, 1024)
    for _ in range(1023):
        pages.add_arena()
    assert pages.bases is first
    pages.add_arena()
    assert pages.bases.shape == (5, 2048)
    here = PageArrays(4, 16, 8, 8, torch.float32, torch.device("cpu"))
    here.add_arena()
    assert here.bases.shape == (5, 1)
    assert here.nbytes == 4 * 16 * (2 * 8 * 4 + 8)


def test_arenas_are_larger_on_a_device() -> None:
    assert arena_bytes_on(torch.device("cpu"), None) == 8 << 20
    assert arena_bytes_on(torch.device("meta"), None) == 64 << 20
    assert arena_bytes_on(torch.device("meta"), MemoryLimit(64 << 20)) == 1 << 20


def test_roomy_sizes() -> None:
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert sorted({roomy(n) for n in range(1, 257)}) == sizes
    for n in range(1, 257):
        assert roomy(n) == min(size for size in sizes if size >= n)


class Capture:
    """A graph of a device that is not there; it ends with an error where one is given."""

    failure: RuntimeError | None = None

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"

    def capture_end(self) -> None:
        if self.failure is not None:
            raise self.failure

    def pool(self) -> tuple[int, int]:
        return 0, 7


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, int]]]:
    """Pools in which the allocator was told to record no more."""
    pools: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Capture)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda device, pool: pools.append((device, pool)), raising=False
    )
    return pools


def test_no_garbage_is_collected_while_a_step_is_recorded(ended: list[tuple[int, tuple[int, int]]]) -> None:
    seen = []
    cuda_graphs._captured(lambda: seen.append(gc.isenabled()), None)
    assert seen == [False]
    assert gc.isenabled()
    assert not ended


def test_a_capture_that_fails_is_over_and_names_its_own_error(
    ended: list[tuple[int, tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Capture, "failure", RuntimeError("invalidated"))
    with pytest.raises(RuntimeError, match="invalidated"):
        cuda_graphs._captured(lambda: None, None)
    with pytest.raises(ZeroDivisionError):  # and not what the device says about it
        cuda_graphs._captured(lambda: 1 // 0, None)
    assert ended == [(3, (0, 7))] * 2
    assert gc.isenabled()
