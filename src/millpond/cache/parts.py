"""Values that one layer's step hands around: how it attends, what a plan chooses from, a state to go back to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from millpond.cache.queries import QueryMemory
from millpond.cache.rolling import Rolling
from millpond.cache.table import RegionTable

if TYPE_CHECKING:
    from millpond.cache.focus import Focus
    from millpond.cache.headwise import Headwise


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one layer's attention does besides softmax(q k / sqrt d): see `ops.decode`."""

    scale: float
    softcap: float = 0.0
    window: int = 0
    sink_logits: Tensor | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        """As keyword arguments of the ops."""
        return {name: getattr(self, name) for name in self.__slots__}


class Candidates(NamedTuple):
    """The entries of one sequence that a plan chooses from: stored ones (padded), then new ones."""

    keys: Tensor  #: (H, N, key_dim)
    values: Tensor  #: (H, N, value_dim)
    positions: Tensor  #: (H, N) int32, -1 for none
    scores: Tensor  #: (H, N) float32
    log_masses: Tensor | None = None  #: (H, N) float32; None where entries have no masses


@dataclass(slots=True)
class LayerState:
    """A layer's state at one moment; its pages are shared with the layer until one of the two writes."""

    table: RegionTable | None
    columns: int
    pending: frozenset[int]
    queries: QueryMemory
    memories: dict[int, Tensor]
    rolling: Rolling | None
    headwise: Headwise | None
    focus: Focus | None

    def release(self) -> None:
        """Let go of the pages."""
        if self.table is not None:
            self.table.clear()
            self.table = None


def by_position(positions: Tensor) -> Tensor:
    """(H, N) column order: ascending positions, -1 last."""
    return torch.where(positions < 0, torch.iinfo(torch.int32).max, positions).argsort(dim=1, stable=True)
