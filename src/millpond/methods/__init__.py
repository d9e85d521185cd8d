"""One file per paper: a named composition with the paper's defaults. Dropping a file in registers it."""

from millpond.policy.policy import Policy
from millpond.registry import Registry

METHODS: Registry[Policy] = Registry("method", __name__)

method = METHODS.register


def list_methods() -> list[str]:
    """The names of all methods, sorted: those of this package and those that installed packages add."""
    return METHODS.names()
