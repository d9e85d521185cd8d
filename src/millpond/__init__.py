"""Millpond: give any Hugging Face decoder a memory budget for its KV cache.

Importing this package patches nothing and loads no torch; each name is imported when it is first used. `compress`
switches one model's attention, and `close` switches it back.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond import cluster as cluster
    from millpond.budget import Budget as Budget
    from millpond.cache.chunks.store import ChunkStore as ChunkStore
    from millpond.codec import list_codecs as list_codecs
    from millpond.engine.async_llm import AsyncLLM as AsyncLLM
    from millpond.engine.chunks.prompt import Chunk as Chunk
    from millpond.engine.chunks.prompt import Prompt as Prompt
    from millpond.engine.config import EngineConfig as EngineConfig
    from millpond.engine.llm import LLM as LLM
    from millpond.engine.offload.plan import Plan as Plan
    from millpond.engine.offload.planner import plan as plan
    from millpond.engine.request import CacheOptions as CacheOptions
    from millpond.engine.sampling.params import SamplingParams as SamplingParams
    from millpond.errors import BudgetError as BudgetError
    from millpond.errors import CacheMismatchError as CacheMismatchError
    from millpond.errors import DataError as DataError
    from millpond.errors import MillpondError as MillpondError
    from millpond.errors import NotPicklableError as NotPicklableError
    from millpond.errors import NumericsError as NumericsError
    from millpond.errors import OptionError as OptionError
    from millpond.errors import PoolFullError as PoolFullError
    from millpond.errors import UnsupportedModelError as UnsupportedModelError
    from millpond.errors import WouldForgetError as WouldForgetError
    from millpond.hf.ask import TextAnswer as TextAnswer
    from millpond.hf.ask import ask as ask
    from millpond.hf.cache import MillpondCache as MillpondCache
    from millpond.hf.calibration.transform import calibrate_transform as calibrate_transform
    from millpond.hf.compress import compress as compress
    from millpond.hf.document import restore_document as restore_document
    from millpond.hf.document import save_document as save_document
    from millpond.hf.stats import CacheStats as CacheStats
    from millpond.hf.text_storage import TextStorage as TextStorage
    from millpond.methods import list_methods as list_methods
    from millpond.models.load import load_model as load_model
    from millpond.models.load import load_tokenizer as load_tokenizer
    from millpond.models.load import model_folder as model_folder
    from millpond.policy.policy import Policy as Policy
    from millpond.presets import preset as preset
    from millpond.presses import press as press
    from millpond.prompt_marks import PromptMarks as PromptMarks
    from millpond_lab.fit import fit as fit

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
    "TextStorage": "millpond.hf.text_storage",
    "UnsupportedModelError": "millpond.errors",
    "WouldForgetError": "millpond.errors",
    "ask": "millpond.hf.ask",
    "calibrate_transform": "millpond.hf.calibration.transform",
    "compress": "millpond.hf.compress",
    "fit": "millpond_lab.fit",
    "list_codecs": "millpond.codec",
    "list_methods": "millpond.methods",
    "load_model": "millpond.models.load",
    "load_tokenizer": "millpond.models.load",
    "model_folder": "millpond.models.load",
    "plan": "millpond.engine.offload.planner",
    "preset": "millpond.presets",
    "press": "millpond.presses",
    "restore_document": "millpond.hf.document",
    "save_document": "millpond.hf.document",
}

#: Of these, what the package millpond-lab defines.
_IN_LAB = {"fit"}

__all__ = sorted(_HOME)


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
