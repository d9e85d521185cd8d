"""The names of transformers 5.24 on older versions, so that the tests are written once.

Tests pass stock caches as `cache` and read `.cache` of outputs. Before 5.24 both are called `past_key_values`; caches
of Millpond may have either name with any version, which tests/hf/test_cache_argument.py holds.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.utils.generic import ModelOutput

from millpond.models.cache_argument import CACHE_ARGUMENT


def use_new_names() -> None:
    """Let models of an older transformers take `cache`; does nothing from 5.24 on."""
    if CACHE_ARGUMENT == "cache":
        return

    def renamed(inner: Any) -> Any:
        @wraps(inner)
        def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
            if "cache" in kwargs:
                kwargs[CACHE_ARGUMENT] = kwargs.pop("cache")
            return inner(self, *args, **kwargs)

        return outer

    PreTrainedModel.__call__ = renamed(PreTrainedModel.__call__)  # type: ignore[method-assign]
    GenerationMixin.generate = renamed(GenerationMixin.generate)  # type: ignore[method-assign]
    ModelOutput.cache = property(lambda self: self[CACHE_ARGUMENT])  # type: ignore[attr-defined]
