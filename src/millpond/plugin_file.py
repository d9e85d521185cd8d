"""A Python file of a user's own, which registers methods or other things by name without being installed."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.registry import Registry


def load_plugin(path: Path | None, *others: Registry[Any]) -> None:
    """Run a Python file, so that what it registers is known by name in this process.

    A file that is imported already, because it is installed too, is not run again.

    Args:
        path: The file; None: there is none, and nothing is done.
        *others: Registries that it may add to, besides that of the methods.

    Raises:
        OptionError: there is no such file, or it fails.
    """
    if path is None:
        return
    path = path.resolve()
    for registry in (METHODS, *others):
        registry.names()  # what is installed comes first: it may be this file
    if any(getattr(module, "__file__", None) == str(path) for module in list(sys.modules.values())):
        return
    spec = spec_from_file_location(f"millpond_plugin_{path.stem}", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        kinds = " or ".join(f"{registry.kind}s" for registry in (METHODS, *others))
        raise OptionError(f"plugin {path} must be a Python file that registers {kinds}")
    sys.modules[spec.name] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # of any kind: it is not our code
        del sys.modules[spec.name]
        raise OptionError(f"plugin {path} fails with {type(error).__name__}: {error}") from error
