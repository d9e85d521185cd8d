"""Optional libraries: imported when they are needed; an error names the extra that installs a missing one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from millpond.errors import OptionError
from millpond.install_command import install_command


def require(library: str, extra: str, purpose: str) -> Any:
    """Import a library that only an extra installs.

    Args:
        library: Module of the library, such as "matplotlib".
        extra: Extra of this package, such as "plot".
        purpose: Use of the library, as the subject of the error's sentence.

    Raises:
        OptionError: it, or a library that it needs, is not installed.
    """
    try:
        return import_module(library)
    except ModuleNotFoundError as error:
        name = error.name or library.partition(".")[0]
        raise OptionError(f"{purpose} needs {name}; install it with: {install_command(extra)}") from None
