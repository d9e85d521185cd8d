"""One file per method: a composition of shared parts with the paper's defaults. A new file registers itself."""

from millpond.policy.policy import Policy
from millpond.registry import Registry

METHODS: Registry[Policy] = Registry("method", __name__)

method = METHODS.register


def list_methods() -> list[str]:
    """Return the names of all methods, sorted, those of installed packages included."""
    return METHODS.names()
