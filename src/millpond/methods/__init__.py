"""One file per method: a composition of shared parts with the paper's defaults. A new file registers itself."""

from typing import Any

from millpond.policy.policy import Policy
from millpond.registry import Registry

METHODS: Registry[Policy] = Registry("method", __name__)

method = METHODS.register


def make_policy(name: str, options: dict[str, Any]) -> Policy:
    """Return the policy of a named method.

    Raises:
        OptionError: no such method or option.
    """
    return METHODS.get(name)(**options)


def list_methods() -> list[str]:
    """Return the names of all methods, sorted, those of installed packages included."""
    return METHODS.names()
