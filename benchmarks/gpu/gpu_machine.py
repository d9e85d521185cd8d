"""What the scripts for a CUDA GPU share: where they run, how they measure, the pages of a layer, what is equal."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch
from gpu_rows import Row
from torch import Tensor

from millpond.kernels.args import PageRegions
from millpond.kernels.pages import PageArrays

if TYPE_CHECKING:
    from torch.cuda import CUDAGraph

ARENA_BYTES = 2**28
#: relative to the largest number of the reference: float32 has the order of sums, the others the rounding of p
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SCORE_TOLERANCE = 1e-4
#: of log-sum-exp and scores over codes: a GPU rounds once where two products are added, so that a key may become the
#: number of 16 bits next to that of the reference
CODE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FAR = 1e9  # an infinity that JSON can hold


class Machine:
    """Where the script runs, and how it measures time there.

    Args:
        part: (k, n): of all checks every n-th from the k-th on, so that n processes compile kernels side by side.
    """

    def __init__(self, interpret: bool, tiny: bool, part: tuple[int, int] = (0, 1)) -> None:
        self._part, self._counted = part, 0
        self.cuda = not interpret
        self.tiny = tiny
        if self.cuda and not torch.cuda.is_available():
            raise SystemExit("no CUDA device; use --interpret --tiny to test this script on a CPU")
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.repeats = 20 if self.cuda else 1

    def describe(self) -> Row:
        """The card, the versions and the day, for each row."""
        names = ("torch", "triton", "transformers", "millpond")
        versions = {name: importlib.import_module(name).__version__ for name in names}
        card = torch.cuda.get_device_name() if self.cuda else "cpu, interpreter"
        day = datetime.now(UTC).date().isoformat()
        return {"card": card, **versions, "day": day, **({"tiny": True} if self.tiny else {})}

    def mine(self) -> bool:
        """Whether the next check is of this process."""
        self._counted += 1
        return self._counted % self._part[1] == self._part[0]

    def ms(self, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """Median time of `run` in milliseconds, after three runs that do not count."""
        times: list[float] = []
        for _ in range(self.repeats + (3 if self.cuda else 0)):
            before()
            if self.cuda:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                run()
                end.record()
                torch.cuda.synchronize()
                spent = begin.elapsed_time(end)
            else:
                start = time.perf_counter()
                run()
                spent = (time.perf_counter() - start) * 1e3
            times.append(spent)
        return statistics.median(times[3:] if self.cuda else times)

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self.cuda:
            torch.cuda.synchronize()

    def reset_memory(self) -> None:
        """Count the most memory from now on."""
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """The most memory of the device since `reset_memory`."""
        return torch.cuda.max_memory_allocated() if self.cuda else 0

    def graphed(self, run: Callable[[], object]) -> Callable[[], object]:
        """`run` as one replay of a CUDA graph; `run` itself on the CPU. Runs it twice to compile."""
        if not self.cuda:
            return run
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph: CUDAGraph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


def ints(values: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(device)


class Layer:
    """The pages, the table and the lengths of one layer, filled with random entries in pages of random order."""

    def __init__(
        self,
        machine: Machine,
        dtype: torch.dtype,
        dims: tuple[int, int],
        slots: int,
        n_regions: int,
        width: int,
        lens: list[int],
        seed: int = 0,
    ) -> None:
        device = machine.device
        torch.manual_seed(seed)
        n_pages = -(-width // slots)
        page_bytes = slots * sum(dims) * dtype.itemsize
        fit = max(1, min(n_regions * n_pages, ARENA_BYTES // page_bytes))
        per_arena = 1 << (fit.bit_length() - 1) if fit > 8 else 4
        self.pages = PageArrays(per_arena, slots, *dims, dtype, device)
        while self.pages.n_arenas * per_arena < n_regions * n_pages:
            self.pages.add_arena()
        for tensor in (*self.pages.keys, *self.pages.values):
            tensor.normal_()
        for tensor in (*self.pages.positions, *self.pages.scores):
            tensor.zero_()
        self.table = torch.randperm(n_regions * n_pages).view(n_regions, n_pages).int().to(device)
        self.lens = ints(lens, device)
        places = torch.arange(n_pages * slots, device=device) % slots
        page = self.table.long().repeat_interleave(slots, 1)
        # positions: a permutation, the same in each region; accumulators far apart, so that rounding decides nothing
        order = torch.randperm(n_pages * slots, device=device)
        for n in range(self.pages.n_arenas):
            here = page // per_arena == n
            rows, columns = page[here] % per_arena, places.expand_as(page)[here]
            self.pages.positions[n][rows, columns] = order.expand_as(page)[here].int()
            self.pages.scores[n][rows, columns] = (order.flip(0) * 0.37).expand_as(page)[here]

    @property
    def regions(self) -> PageRegions:
        return PageRegions(self.pages, self.table, self.lens)

    def twin(self) -> Layer:
        other = object.__new__(Layer)
        old = self.pages
        other.pages = PageArrays(old.pages_per_arena, old.slots, old.key_dim, old.value_dim, old.dtype, old.device)
        other.pages.keys, other.pages.values = [t.clone() for t in old.keys], [t.clone() for t in old.values]
        other.pages.positions, other.pages.scores = [t.clone() for t in old.positions], [t.clone() for t in old.scores]
        other.pages.refresh()
        other.table, other.lens = self.table, self.lens.clone()
        return other


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest finite number of `want`; infinities must agree."""
    got, want = got.double(), want.double()
    finite = want.isfinite()
    if not bool((got.isfinite() == finite).all()) or not bool((got[~finite] == want[~finite]).all()):
        return FAR
    if want.numel() == 0 or not bool(finite.any()):
        return 0.0
    return float((got - want)[finite].abs().max() / want[finite].abs().max().clamp(min=1e-3))


def page_error(got: PageArrays, want: PageArrays) -> float:
    """FAR unless keys, values and positions are equal bit by bit; else the error of the accumulators."""
    for name in ("keys", "values", "positions"):
        if not all(map(torch.equal, getattr(got, name), getattr(want, name))):
            return FAR
    return max(map(error, got.scores, want.scores))
