"""Classes for the platform that vLLM runs on."""

from __future__ import annotations


def on_cpu() -> bool:
    """Whether the installed vLLM is built for CPUs."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return True
    return bool(current_platform.is_cpu())


def scheduler_class() -> str:
    """Return the path of the scheduler: on CPUs vLLM schedules step by step, elsewhere one step ahead."""
    name = "MillpondScheduler" if on_cpu() else "MillpondAsyncScheduler"
    return f"millpond_vllm.scheduler.{name}"


def worker_class() -> str:
    """Return the path of the worker."""
    return "millpond_vllm.cpu_worker.MillpondCPUWorker" if on_cpu() else "millpond_vllm.gpu_worker.MillpondGPUWorker"
