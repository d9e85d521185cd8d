"""A place where weights and KV can lie: memory of a device, of the host, or a disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True)
class Tier:
    """A place with a capacity.

    Attributes:
        name: by which a ledger knows it. kind: where it is.
        capacity_bytes: most bytes that it may hold; None for no limit.
    """

    name: str
    kind: Kind
    capacity_bytes: int | None = None
