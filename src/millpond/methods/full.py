"""full: the baseline that keeps every entry."""

from millpond.methods import method
from millpond.policy.policy import Policy


@method("full")
def full() -> Policy:
    """Keep everything: the reference that every other method is measured against."""
    return Policy()
