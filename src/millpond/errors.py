"""Every error that Millpond raises on purpose.

MillpondError
├── OptionError (ValueError)         an option or a name that does not exist, or a value out of range
│   ├── ImageError                   an image that is refused
│   └── BudgetError                  a budget that cannot be met
│       └── WouldForgetError         a request that must forget nothing, and would
├── DataError (ValueError)           a data file that cannot be read, or lacks a field
├── UnsupportedModelError            a model whose attention cannot be replaced
├── CacheMismatchError               a cache used with another model, batch or order than it was made for
├── NotPicklableError (TypeError)    a cache that is to be pickled
├── PoolFullError (MemoryError)      the page pool reached its hard limit; what is cached stays readable
└── NumericsError (ArithmeticError)  NaN where a number is needed
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Characters of an unknown name that are compared and shown: to compare takes their square.
_LONGEST_NAME = 80


class MillpondError(Exception):
    """Base class of all errors of this package."""


class OptionError(MillpondError, ValueError):
    """An unknown name, an unknown option, or a value out of its range."""


class ImageError(OptionError):
    """An image that is refused: remote, too large, damaged, or of a kind that is not read."""


class BudgetError(OptionError):
    """A budget that cannot be parsed or cannot be met."""


class WouldForgetError(BudgetError):
    """A request that must forget nothing of its prompt (`on_pressure="refuse"`), and would."""


class DataError(MillpondError, ValueError):
    """A data file that cannot be read, or lacks a field that is needed."""


class UnsupportedModelError(MillpondError):
    """A model whose attention does not go through the transformers attention interface."""


class CacheMismatchError(MillpondError):
    """A cache that meets another model, batch size or call order than it was made for."""


class NotPicklableError(MillpondError, TypeError):
    """A cache lives in the pages of a pool in this process, which a pickle cannot carry."""


class PoolFullError(MillpondError, MemoryError):
    """The page pool reached its hard limit. Nothing was lost: what is cached stays readable.

    A request that could never fit is refused by `Engine.add` with BudgetError; one that does not fit now waits.
    """


class NumericsError(MillpondError, ArithmeticError):
    """Attention produced NaN, so no score can be trusted."""


def unknown(kind: str, name: str, known: Iterable[str]) -> OptionError:
    """Return an error for a name that is not in `known`, suggesting the closest known name."""
    names = sorted(known)
    brief_name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    close = difflib.get_close_matches(brief_name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return OptionError(f"unknown {kind} {brief_name!r}{hint} Known: {', '.join(names) or 'none'}")
