"""Memory of a GPU that the pages of an engine may take: what is free when it starts, without what its steps need."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from millpond.engine.config import EngineConfig
from millpond.engine.scheduler import MAX_PIECES, READING_SHARE
from millpond.errors import BudgetError
from millpond.kernels.card import Card
from millpond.models.device import check_dtype_there
from millpond.runner.packed_model import PackedModel

#: Share of a card's memory, and the least bytes, that stay for recorded graphs, for the workspaces of libraries and of
#: the kernels, and for gaps between what is allocated.
SPARE_SHARE, LEAST_SPARE = 0.03, 256 << 20
#: Copies of the logits that choosing tokens makes, in float32, the model's own aside.
LOGIT_COPIES = 2


class DeviceRoom(NamedTuple):
    """Free memory of a GPU beside the weights, by what takes it.

    Attributes:
        card: The card.
        step_bytes: Most bytes of the activations and logits of a step.
        spare_bytes: Bytes of recorded graphs, workspaces and gaps.
    """

    card: Card
    step_bytes: int
    spare_bytes: int

    @classmethod
    def of(cls, model: PackedModel, config: EngineConfig, cuda: Any = torch.cuda) -> DeviceRoom:
        """Compute it for a model whose weights are on its device already."""
        card = Card.of(model.device, cuda)
        rows = max(config.max_step_tokens, config.max_running + max(config.max_step_tokens // READING_SHARE, 1))
        logit_bytes = model.vocabulary * (model.dtype.itemsize + 4)
        logit_rows = min(config.max_running + MAX_PIECES, rows)
        step_bytes = rows * (model.row_bytes - logit_bytes)
        step_bytes += logit_rows * (logit_bytes + 4 * LOGIT_COPIES * model.vocabulary)
        return cls(card, step_bytes, max(LEAST_SPARE, spare_bytes(card.total_bytes)))

    @property
    def page_bytes(self) -> int:
        """Bytes that pages may take; negative where a step does not fit."""
        return self.card.free_bytes - self.step_bytes - self.spare_bytes

    def __str__(self) -> str:
        return (
            f"{self.card.name} has {self.card.free_bytes:,} of {self.card.total_bytes:,} bytes free beside the "
            f"weights, of which a step takes up to {self.step_bytes:,}, and recorded graphs and workspaces "
            f"{self.spare_bytes:,}"
        )


def spare_bytes(total_bytes: int) -> int:
    """Return the part of a memory that stays for what nobody counts."""
    return int(total_bytes * SPARE_SHARE)


def page_limit(model: PackedModel, config: EngineConfig, cuda: Any = torch.cuda) -> int | None:
    """Return the most bytes of all pages, or None for no limit.

    They are `kv_memory`, or on a GPU what it has left: so a request waits that it has no memory for, which without a
    limit would fail in the midst of a step.

    Args:
        model: The model, on its device.
        config: Settings.
        cuda: Module that knows the device; tests pass their own.

    Raises:
        OptionError: the card lacks the model's dtype.
        BudgetError: the GPU has no memory for pages, or less than `kv_memory`.
    """
    limit = config.kv_limit
    if model.device.type != "cuda":
        return limit
    check_dtype_there(model.device, model.dtype, cuda=cuda)
    room = DeviceRoom.of(model, config, cuda)
    if limit is None and room.page_bytes <= 0:
        raise BudgetError(
            f"{room}: nothing is left for keys and values; lower max_step_tokens ({config.max_step_tokens}) or "
            f"max_running ({config.max_running}), give device_memory= so that layers stay on the host, or choose a "
            "smaller model"
        )
    if limit is not None and limit > room.card.free_bytes:
        raise BudgetError(f"kv_memory={limit:,} bytes is more than is there: {room}; lower it, or leave it out")
    return room.page_bytes if limit is None else limit
