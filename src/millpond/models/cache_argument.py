"""Keyword argument by which models of transformers take their cache: `cache` since 5.24, `past_key_values` before."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

from millpond.errors import OptionError

#: The name that the installed transformers uses, for arguments and in outputs.
CACHE_ARGUMENT = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"
#: Both names. Models with a Millpond cache take either, whatever the version.
CACHE_ARGUMENTS = ("cache", "past_key_values")


def cache_argument(cache: Any) -> dict[str, Any]:
    """Return the keyword argument that passes a cache to a model or to `generate`."""
    return {CACHE_ARGUMENT: cache}


def cache_among(arguments: dict[str, Any]) -> Any:
    """Return the cache among keyword arguments, under either name, or None."""
    return next((arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)


def check_one_cache(arguments: dict[str, Any]) -> None:
    """Check that the two names do not have different caches.

    Raises:
        OptionError: they have.
    """
    given = [arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None]
    if any(other is not given[0] for other in given):
        kinds = " and ".join(
            f"{name}= ({type(one).__name__})" for name, one in zip(CACHE_ARGUMENTS, given, strict=True)
        )
        raise OptionError(f"{kinds} are two names of one argument and have different caches; pass one of the two")


def with_cache(arguments: dict[str, Any], cache: Any) -> dict[str, Any]:
    """Return the keyword arguments with this cache instead of any other.

    It is under the name that the installed transformers uses.
    """
    return {name: value for name, value in arguments.items() if name not in CACHE_ARGUMENTS} | cache_argument(cache)


def cache_of(output: Any) -> Any:
    """Return the cache that a model's output carries."""
    return getattr(output, CACHE_ARGUMENT)
