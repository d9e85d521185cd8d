"""Search and loading of the native library that suits this CPU best, and huge pages for what it reads repeatedly."""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch  # noqa: F401  (before any library: the kernels use the thread pool that torch brings)
from torch import Tensor

from millpond.cpu_limit import usable_cpus
from millpond.errors import MillpondError, OptionError
from millpond.install_command import build_command

ABI = 34  #: of csrc/common/cpu.cpp
#: Instruction sets with the level of CPU that they need, see mp_cpu_level in csrc/common/cpu.cpp. v4fma is v4bf16 with
#: products of floats where there is much to multiply.
X86 = {"baseline": 0, "v3": 1, "v4": 2, "v4fma": 3, "v4bf16": 3}
PROBE = "cpu"  #: the library that says which of the others this CPU can run
NEEDS = ("SSE 4.2", "AVX2 and FMA", "AVX-512 F, BW, VL, DQ", "AVX-512 BF16 and VNNI")  #: by level


class NativeKernelsWarning(UserWarning):
    """Warning that native CPU kernels are missing, so that the slow torch reference runs."""


class StaleKernelsError(MillpondError):
    """Error of native kernels that were built from other sources than those that run."""


def _folders() -> list[Path]:
    # an editable install keeps the libraries apart from the sources; the package path names both folders
    return [Path(folder) for folder in sys.modules[__package__ or __name__].__path__]


def installed() -> dict[str, Path]:
    """Return the libraries of this install, by instruction set.

    A build from source has that of its machine alone.
    """
    return {name: file for name, file in _files().items() if name != PROBE}


def _files() -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for folder in _folders():
        for file in sorted(folder.glob("millpond_*.so")):
            paths.setdefault(file.stem.removeprefix("millpond_"), file)
    return paths


def _open(path: Path) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(path))
        abi = library.mp_abi_version()
    except (OSError, AttributeError):
        return None
    if abi != ABI:
        raise StaleKernelsError(
            f"{path} has interface {abi} and these sources need {ABI}: it was built from others. Build it again: "
            f"{build_command()}"
        )
    return library


def runnable() -> list[str]:
    """Return the installed instruction sets that this CPU can run, best first."""
    have, files = installed(), _files()
    if "neon" in have:
        return ["neon"]
    probe = _open(files[PROBE]) if PROBE in files else None
    if probe is None:
        return []
    level, fma_first = probe.mp_cpu_level(), bool(probe.mp_cpu_prefers_floats())
    can = [name for name, needed in reversed(X86.items()) if needed <= level and name in have]
    return sorted(can, key=lambda name: fma_first and name != "v4fma")


@cache
def load() -> tuple[str, ctypes.CDLL] | None:
    """Return the chosen instruction set and its library; None if there is none to run.

    Raises:
        OptionError: MILLPOND_ISA names one that is not installed or that this CPU cannot run.
        StaleKernelsError: a library was built from other sources.
    """
    can = runnable()
    requested_isa = os.environ.get("MILLPOND_ISA", "")
    if requested_isa and requested_isa not in can:
        usable = ", ".join(can) or "none"
        if requested_isa not in (*X86, "neon"):
            raise OptionError(
                f"MILLPOND_ISA={requested_isa!r} is not an instruction set; this install can run: {usable}"
            )
        needs = (
            f"needs a CPU with {NEEDS[X86[requested_isa]]} and a build that has it"
            if requested_isa in X86
            else "is not built"
        )
        raise OptionError(f"MILLPOND_ISA={requested_isa!r} cannot run here: it {needs}; this install can run: {usable}")
    for name in [requested_isa] if requested_isa else can:
        library = _open(installed()[name])
        if library is not None:
            library.mp_limit_threads(usable_cpus())
            return name, library
    return None


def warn_missing() -> None:
    others = ", ".join(sorted(installed()))
    if others:
        why = f"millpond's native CPU kernels were built for another processor ({others})"
        way_out = f"Build them here: {build_command()}"
    else:
        why = "millpond was installed without its native CPU kernels"
        way_out = f"Install a C++ compiler (GCC or Clang) and reinstall: {build_command()}"
    warnings.warn(
        f"{why}, so the torch reference runs, many times slower. {way_out}", NativeKernelsWarning, stacklevel=2
    )


#: Tensors that lie this close to one another share a page, so their memory is requested as one.
NEAR = 2**16
#: Bytes per call, between two checks of the time limit: whole pages.
STRIDE = 2**26
PAGE = 2**21


def use_huge_pages(tensors: Iterable[Tensor], seconds: float = 5.0) -> int:
    """Ask the system for huge pages under CPU tensors; their contents and addresses stay.

    A hint: where the system has none to give, nothing happens. It takes the time of a copy.

    Args:
        tensors: Contiguous tensors that are read as a whole.
        seconds: Seconds after which no more pages are requested.

    Returns:
        Bytes in huge pages now.
    """
    loaded = load()
    if loaded is None:
        return 0
    function = loaded[1].mp_use_huge_pages
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    done, deadline = 0, time.monotonic() + seconds
    for begin, end in _ranges(tensors):
        first = -(-begin // PAGE) * PAGE
        for at in range(first, end, STRIDE):
            if time.monotonic() > deadline:
                return done
            done += int(function(at, min(STRIDE, end - at)))
    return done


def _ranges(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return addresses (begin, end) of the memory of tensors, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.is_cpu):
        if ranges and begin - ranges[-1][1] <= NEAR:
            begin, before = ranges.pop()
            end = max(end, before)
        ranges.append((begin, end))
    return ranges
