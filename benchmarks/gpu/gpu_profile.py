"""A profile of some calls: which kernels take the time, what is launched, where the host waits and the device idles."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from gpu_machine import Machine
from gpu_rows import Row
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MOST_KERNELS = 20
#: Calls of CUDA in which the host may wait for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
#: A gap between two kernels that is longer than this is counted.
GAP_US = 5.0


def profiled(machine: Machine, run: Callable[[], object], times: int) -> Row:
    """Figures of one call in the mean over `times` of them, after one that does not count."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if machine.cuda else [])]
    run()
    machine.wait()
    begin = time.perf_counter()
    for _ in range(times):
        run()
    machine.wait()
    plain_ms = (time.perf_counter() - begin) / times * 1e3
    with profile(activities=kinds) as record:
        begin = time.perf_counter()
        for _ in range(times):
            run()
        machine.wait()
        wall_ms = (time.perf_counter() - begin) / times * 1e3
    events: list[Any] = list(record.events() or [])
    device = [event for event in events if event.device_type == DeviceType.CUDA]
    # without a device the operators of torch take the place of kernels
    shown = device or [event for event in events if event.cpu_parent is None]
    row: Row = {"ms": plain_ms, "ms_with_profiler": wall_ms, "calls": times, "top": top(shown, times)}
    counted = Counter(event.name for event in events if event.device_type == DeviceType.CPU)
    row["launches"] = {name: counted[name] / times for name in LAUNCHES if counted[name]}
    row["waits"] = {
        name: {"calls": counted[name] / times, "ms": total_ms(events, name) / times} for name in WAITS if counted[name]
    }
    return row | idle(device, times)


def total_ms(events: list[Any], name: str) -> float:
    """Milliseconds of the host in calls of one name."""
    return float(sum(event.time_range.elapsed_us() for event in events if event.name == name)) / 1e3


def top(events: list[Any], times: int) -> list[Row]:
    """The names that took longest, with microseconds and number per call of what is profiled."""
    spent: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for event in events:
        spent[event.name] += event.time_range.elapsed_us()
        counted[event.name] += 1
    return [
        {"name": name[:120], "us": us / times, "number": counted[name] / times}
        for name, us in spent.most_common(MOST_KERNELS)
    ]


def idle(device: list[Any], times: int) -> Row:
    """How long the device worked, and its gaps in between; {} where there is none."""
    if not device:
        return {}
    spans = sorted((event.time_range.start, event.time_range.end) for event in device)
    busy, gaps, end = 0.0, [], spans[0][0]
    for start, stop in spans:
        if start > end:
            gaps.append(start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    long = [gap for gap in gaps if gap > GAP_US]
    return {
        "device_ms": busy / times / 1e3,
        "gap_ms": sum(gaps) / times / 1e3,
        "long_gaps": len(long) / times,
        "longest_gap_us": max(gaps, default=0.0),
        "kernels": len(spans) / times,
    }
