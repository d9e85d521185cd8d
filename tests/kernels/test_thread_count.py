"""Threads of torch's loops and of native kernels around a pass."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from millpond.kernels import thread_count as thread_count_module
from millpond.kernels.linear import multiply_rows
from millpond.kernels.thread_count import end_own_threads, thread_count, torch_on_all_threads, torch_on_one_thread

pytestmark = pytest.mark.usefixtures("two_threads")


def test_inside_torch_has_one_thread_and_native_kernels_keep_theirs() -> None:
    with torch_on_one_thread():
        assert torch.get_num_threads() == 1
        assert thread_count() == 2
        with torch_on_one_thread():
            assert thread_count() == 2
        assert torch.get_num_threads() == 1
        with torch_on_all_threads():
            assert torch.get_num_threads() == thread_count() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == thread_count() == 2


def test_an_error_gives_the_threads_back() -> None:
    with pytest.raises(ValueError, match="inside"), torch_on_one_thread(), torch_on_all_threads():
        raise ValueError("inside")
    assert torch.get_num_threads() == thread_count() == 2


def test_another_thread_is_not_concerned() -> None:
    found: list[int] = []

    def look() -> None:
        found.extend((torch.get_num_threads(), thread_count()))

    with torch_on_one_thread():
        other = threading.Thread(target=look)
        other.start()
        other.join()
    assert found == [2, 2]


def test_a_large_product_has_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = torch.nn.functional.linear

    def noting(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(torch.get_num_threads())
        return plain(x, weight, bias)

    monkeypatch.setattr("millpond.kernels.linear.functional.linear", noting)
    with torch_on_one_thread():
        multiply_rows(torch.ones(4, 8), torch.ones(3, 8))
    assert seen
    assert set(seen) == {2}


def test_all_threads_alone_change_nothing() -> None:
    with torch_on_all_threads():
        assert torch.get_num_threads() == thread_count() == 2


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.skipif(thread_count_module._openmp("omp_pause_resource_all") is None, reason="no OpenMP 5 runtime is seen")
def test_threads_that_were_kept_for_loops_end() -> None:
    x = torch.ones(1 << 20)

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def loops() -> None:
        before = threads()
        for _ in range(3):
            x.add(1)
            kept = threads() - before
            end_own_threads()
            found.append((kept, threads() - before))

    found: list[tuple[int, int]] = []
    worker = threading.Thread(target=loops)
    worker.start()
    worker.join()
    assert found == [(1, 0)] * 3
    assert x.add(1)[-1] == 2


def test_a_runtime_without_that_function_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_count_module, "_openmp", lambda name: None)
    end_own_threads()
    with torch_on_one_thread():
        assert thread_count() == 2
