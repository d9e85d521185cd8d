"""Millpond: give any Hugging Face decoder a memory budget for its KV cache.

Importing this package patches nothing; `compress` switches one model's attention, and `close` switches it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millpond.budget import Budget
from millpond.codec import codecs
from millpond.errors import (
    BudgetError,
    CacheMismatchError,
    MillpondError,
    NumericsError,
    OptionError,
    PoolFullError,
    UnsupportedModelError,
)
from millpond.methods import METHODS as _METHODS  # here, so that the name `methods` stays the function below
from millpond.presets import preset

if TYPE_CHECKING:
    from millpond.engine.async_llm import AsyncLLM
    from millpond.engine.llm import LLM
    from millpond.engine.sampling.params import SamplingParams
    from millpond.hf.cache import MillpondCache
    from millpond.hf.compress import compress
    from millpond.hf.document import restore_document, save_document
    from millpond.hf.stats import CacheStats

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 (plainly sorted)
    "AsyncLLM",
    "Budget",
    "BudgetError",
    "CacheMismatchError",
    "CacheStats",
    "LLM",
    "MillpondCache",
    "MillpondError",
    "NumericsError",
    "OptionError",
    "PoolFullError",
    "SamplingParams",
    "UnsupportedModelError",
    "codecs",
    "compress",
    "methods",
    "preset",
    "restore_document",
    "save_document",
]

_LAZY = {
    "AsyncLLM": "millpond.engine.async_llm",
    "CacheStats": "millpond.hf.stats",
    "LLM": "millpond.engine.llm",
    "MillpondCache": "millpond.hf.cache",
    "SamplingParams": "millpond.engine.sampling.params",
    "compress": "millpond.hf.compress",
    "restore_document": "millpond.hf.document",
    "save_document": "millpond.hf.document",
}


def methods() -> list[str]:
    """The names of all methods that decide what is kept."""
    return _METHODS.names()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'millpond' has no attribute {name!r}")
