"""Description of the machine of a measurement: no host names, no paths."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

import millpond
from millpond.kernels import native


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
