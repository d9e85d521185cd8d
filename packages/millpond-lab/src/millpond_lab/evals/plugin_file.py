"""A Python file of a user's own, which registers methods or tasks without being installed."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond_lab.evals.task import TASKS


def load_plugin(path: Path) -> None:
    """Run a Python file, so that what it registers is known by name.

    A file that is imported already, because it is installed too, is not run again.

    Raises:
        OptionError: there is no such file, or it fails.
    """
    path = path.resolve()
    METHODS.names(), TASKS.names()  # what is installed comes first: it may be this file
    if any(getattr(module, "__file__", None) == str(path) for module in list(sys.modules.values())):
        return
    spec = spec_from_file_location(f"millpond_plugin_{path.stem}", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise OptionError(f"plugin {path} must be a Python file that registers methods or tasks")
    sys.modules[spec.name] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # of any kind: it is not our code
        del sys.modules[spec.name]
        raise OptionError(f"plugin {path} fails with {type(error).__name__}: {error}") from error
