"""Classes for the platform that vLLM runs on, and the arguments that select them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond_vllm.settings import KEY, EngineSettings


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


def engine_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an engine of vLLM for settings of `EngineSettings`.

    Raises:
        OptionError: see `EngineSettings.parse`.
        BudgetError: the budget cannot be parsed.
    """
    EngineSettings.parse(given)
    return {
        "scheduler_cls": scheduler_class(),
        "worker_cls": worker_class(),
        "logits_processors": ["millpond_vllm.request_check:RequestCheck"],
        "additional_config": {KEY: dict(given)},
    }
