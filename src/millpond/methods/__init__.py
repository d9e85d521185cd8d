"""One file per paper: a named composition with the paper's defaults. Dropping a file in registers it."""

from millpond.policy.policy import Policy
from millpond.registry import Registry

METHODS: Registry[Policy] = Registry("method", __name__)

method = METHODS.register
