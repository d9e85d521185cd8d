"""Number of CPUs that this process may use: its affinity, and the quotas of its control groups on Linux."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

#: Where Linux tells the control groups of a process, and where they are mounted.
GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cpus(groups: Path = GROUPS, mount: Path = MOUNT) -> int:
    """Return the CPUs that threads of this process can keep busy, at least 1.

    A quota of 1.5 CPUs counts as 2.

    Args:
        groups: File that names the control groups.
        mount: Folder of the control groups; version 2, or 1 with a folder `cpu`.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(quota) for quota in _quotas(groups, mount))]))


def limit_openmp() -> None:
    """Limit OpenMP to `usable_cpus` threads, unless the user has set a number.

    Torch reads the affinity by itself and no quota. Call it before torch is imported.
    """
    usable = usable_cpus()
    if "OMP_NUM_THREADS" not in os.environ and usable < (os.cpu_count() or 1):
        os.environ["OMP_NUM_THREADS"] = str(usable)


def _quotas(groups: Path, mount: Path) -> Iterator[float]:
    """Yield the quotas in CPUs of this process's control group and those around it."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = mount / "cpu" if controllers else mount
        folder = top / path.lstrip("/")
        # inside a container the path may be that of the host: then the group of the container is the top folder
        for place in [folder, *folder.parents]:
            quota = _quota(place)
            if quota is not None:
                yield quota
            if place == top:
                break


def _quota(folder: Path) -> float | None:
    """Return the CPUs that one control group may use, or None without a quota."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None
