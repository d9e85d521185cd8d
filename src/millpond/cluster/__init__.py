"""Many engines as one, in processes of their own that Ray starts: replicas, or pools for prompts and for decoding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.cluster.async_llm import AsyncClusterLLM as AsyncLLM
    from millpond.cluster.async_pipeline import AsyncPipelineLLM
    from millpond.cluster.data import generate_dataset
    from millpond.cluster.llm import ClusterLLM as LLM
    from millpond.cluster.pipeline import PipelineLLM

__all__ = ["LLM", "AsyncLLM", "AsyncPipelineLLM", "PipelineLLM", "generate_dataset"]

#: Public names, and the modules and names that they stand for.
_HOME = {
    "AsyncLLM": ("async_llm", "AsyncClusterLLM"),
    "AsyncPipelineLLM": ("async_pipeline", "AsyncPipelineLLM"),
    "LLM": ("llm", "ClusterLLM"),
    "PipelineLLM": ("pipeline", "PipelineLLM"),
    "generate_dataset": ("data", "generate_dataset"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'millpond.cluster' has no attribute {name!r}")
    module, kind = _HOME[name]
    value = globals()[name] = getattr(import_module(f"millpond.cluster.{module}"), kind)
    return value
