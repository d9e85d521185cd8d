"""Millpond: give any Hugging Face decoder a memory budget for its KV cache.

Importing this package patches nothing and loads no torch; each name is imported when it is first used. `compress`
switches one model's attention, and `close` switches it back.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond import cluster as cluster
    from millpond.budget import Budget
    from millpond.cache.chunks.store import ChunkStore
    from millpond.codec import list_codecs
    from millpond.engine.async_llm import AsyncLLM
    from millpond.engine.chunks.prompt import Chunk, Prompt
    from millpond.engine.config import EngineConfig
    from millpond.engine.llm import LLM
    from millpond.engine.offload.plan import Plan
    from millpond.engine.offload.planner import plan
    from millpond.engine.request import CacheOptions
    from millpond.engine.sampling.params import SamplingParams
    from millpond.errors import (
        BudgetError,
        CacheMismatchError,
        DataError,
        MillpondError,
        NotPicklableError,
        NumericsError,
        OptionError,
        PoolFullError,
        UnsupportedModelError,
        WouldForgetError,
    )
    from millpond.hf.ask import TextAnswer, ask
    from millpond.hf.cache import MillpondCache
    from millpond.hf.compress import compress
    from millpond.hf.document import restore_document, save_document
    from millpond.hf.stats import CacheStats
    from millpond.methods import list_methods
    from millpond.models.load import load_model, load_tokenizer
    from millpond.policy.policy import Policy
    from millpond.presets import preset
    from millpond.prompt_marks import PromptMarks
    from millpond_lab.fit import fit

__version__ = "0.1.0"

#: Public names and the modules that define them.
_HOME = {
    "AsyncLLM": "millpond.engine.async_llm",
    "Budget": "millpond.budget",
    "BudgetError": "millpond.errors",
    "CacheMismatchError": "millpond.errors",
    "CacheOptions": "millpond.engine.request",
    "CacheStats": "millpond.hf.stats",
    "Chunk": "millpond.engine.chunks.prompt",
    "ChunkStore": "millpond.cache.chunks.store",
    "DataError": "millpond.errors",
    "EngineConfig": "millpond.engine.config",
    "LLM": "millpond.engine.llm",
    "MillpondCache": "millpond.hf.cache",
    "MillpondError": "millpond.errors",
    "NotPicklableError": "millpond.errors",
    "NumericsError": "millpond.errors",
    "OptionError": "millpond.errors",
    "Plan": "millpond.engine.offload.plan",
    "Policy": "millpond.policy.policy",
    "PoolFullError": "millpond.errors",
    "Prompt": "millpond.engine.chunks.prompt",
    "PromptMarks": "millpond.prompt_marks",
    "SamplingParams": "millpond.engine.sampling.params",
    "TextAnswer": "millpond.hf.ask",
    "UnsupportedModelError": "millpond.errors",
    "WouldForgetError": "millpond.errors",
    "ask": "millpond.hf.ask",
    "compress": "millpond.hf.compress",
    "fit": "millpond_lab.fit",
    "list_codecs": "millpond.codec",
    "list_methods": "millpond.methods",
    "load_model": "millpond.models.load",
    "load_tokenizer": "millpond.models.load",
    "plan": "millpond.engine.offload.planner",
    "preset": "millpond.presets",
    "restore_document": "millpond.hf.document",
    "save_document": "millpond.hf.document",
}

#: Of these, what the package millpond-lab defines.
_IN_LAB = {"fit"}

__all__ = [  # noqa: RUF022 (plainly sorted)
    "AsyncLLM",
    "Budget",
    "BudgetError",
    "CacheMismatchError",
    "CacheOptions",
    "CacheStats",
    "Chunk",
    "ChunkStore",
    "DataError",
    "EngineConfig",
    "LLM",
    "MillpondCache",
    "MillpondError",
    "NotPicklableError",
    "NumericsError",
    "OptionError",
    "Plan",
    "Policy",
    "PoolFullError",
    "Prompt",
    "PromptMarks",
    "SamplingParams",
    "TextAnswer",
    "UnsupportedModelError",
    "WouldForgetError",
    "ask",
    "compress",
    "fit",
    "list_codecs",
    "list_methods",
    "load_model",
    "load_tokenizer",
    "plan",
    "preset",
    "restore_document",
    "save_document",
]


def __getattr__(name: str) -> Any:
    if name == "cluster":
        return import_module("millpond.cluster")
    if name not in _HOME:
        raise AttributeError(f"module 'millpond' has no attribute {name!r}")
    if name in _IN_LAB:
        from millpond.optional import require

        home = require(_HOME[name], "lab", f"mp.{name}")
    else:
        home = import_module(_HOME[name])
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
