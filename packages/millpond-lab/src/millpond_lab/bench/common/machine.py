"""Description of the machine of a measurement, without host names and paths, and measured memory."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

import millpond
from millpond.kernels import native
from millpond.tiers import free_memory


@dataclass(frozen=True)
class Machine:
    """The hardware and software of one run."""

    cpu: str
    cores: int
    memory_gib: float
    gpu: str
    system: str
    python: str
    torch: str
    transformers: str
    millpond: str
    isa: str
    threads: int

    @property
    def hardware(self) -> str:
        """CPU, cores and memory in one line."""
        gpu = f", {self.gpu}" if self.gpu else ""
        return f"{self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB{gpu}"

    @property
    def software(self) -> str:
        """Versions in one line."""
        return (
            f"{self.system}, Python {self.python}, torch {self.torch}, transformers {self.transformers}, "
            f"millpond {self.millpond} ({self.isa} kernels), {self.threads} threads"
        )

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def header(self, benchmark: str) -> dict[str, object]:
        """First fields of a benchmark's result."""
        return {"benchmark": benchmark, "machine": self.as_dict(), "hardware": self.hardware, "software": self.software}


@contextmanager
def torch_threads(n: int | None) -> Iterator[None]:
    """Inside it torch has `n` threads; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(n or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=_memory_bytes() / 2**30,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        system=platform.system(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        millpond=millpond.__version__,
        isa=native.isa(),
        threads=torch.get_num_threads(),
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the buffers behind some tensors, each buffer once, unused room included."""
    buffers = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(buffers.values())


def give_back() -> None:
    """Return what is free to the operating system, so that a later peak is not hidden in reused memory (glibc)."""
    gc.collect()
    free_memory.give_back()


class PeakMemory:
    """The process's peak resident memory above what it held at the start. Linux; elsewhere `growth` is None."""

    def __init__(self) -> None:
        give_back()
        self._before = _status("VmRSS")
        try:
            _CLEAR.write_text("5")  # resets VmHWM to the current VmRSS
        except OSError:
            self._before = None

    def growth(self) -> int | None:
        """Bytes of the highest point so far above the start."""
        peak = _status("VmHWM")
        return None if self._before is None or peak is None else max(0, peak - self._before)


def resident_bytes() -> int | None:
    """The process's resident memory now; None where the system does not tell."""
    return _status("VmRSS")


def _status(field: str) -> int | None:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
