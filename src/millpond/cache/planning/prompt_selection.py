"""Plans that choose among all tokens of a text by their scores alone: those of one layer, or of many at once.

What such a plan needs to know of the entries, the host knows: how many there are, which are protected, and how many
each head keeps, unless the heads compete. So nothing waits for the device before the entries that stay are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.errors import NumericsError
from millpond.kernels import ops
from millpond.kernels.selection_args import BestArgs, ShareArgs
from millpond.kernels.transfers import ReadBack, on_device
from millpond.policy.eviction_plan import Counts
from millpond.policy.head_allocation import Ada, Uniform
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import is_by_region
from millpond.policy.view import View

Ints = npt.NDArray[np.int32]


def only_selects(policy: Policy) -> bool:
    """Whether every plan of a policy is a choice by scores, as `select` makes it."""
    if policy.score is None or policy.merge is not None or type(policy).plan is not Policy.plan:
        return False
    if policy.makes_room and not policy.gathers:  # entries are stored with their rank
        return False
    heads = policy.heads
    return isinstance(heads, Uniform) or (isinstance(heads, Ada) and not heads.blend)


class Wanted(NamedTuple):
    """Budget of a plan of one layer."""

    layer: int  #: index of the layer
    budget: int  #: entries per KV head
    between: bool = False  #: see `Policy.plan`


class Selection(NamedTuple):
    """The entries that stay of H KV heads of each of L layers."""

    columns: Tensor  #: (L * H, width) int32, ascending; anything after the entries of a region
    counts: Ints  #: (L, H) entries of each region, on the host
    capacities: Counts  #: (L, H) the most entries that each region may hold from now on
    check: ScoreCheck  #: whether scores are NaN


class ScoreCheck:
    """The refusal of NaN in the scores of plans, for which nothing waits.

    Args:
        is_nan: (L * H,) bool, regions with such scores.
        layers: Indices of the L layers.
    """

    def __init__(self, is_nan: Tensor, layers: Sequence[int]) -> None:
        self._read: ReadBack | None = ReadBack([is_nan])
        self._layers = layers

    @property
    def is_ready(self) -> bool:
        """Whether `settle` would not wait."""
        return self._read is None or self._read.is_ready()

    def settle(self) -> None:
        """Wait for the plans.

        Raises:
            NumericsError: scores of one of them are NaN.
        """
        read, self._read = self._read, None
        if read is None:
            return
        bad = np.flatnonzero(read.wait()[0].numpy().reshape(len(self._layers), -1).any(1))
        if len(bad):
            raise NumericsError(
                f"layer {self._layers[bad[0]]}: the attention scores are NaN; check the model's weights and inputs"
            )


def select(policy: Policy, view: View, wanted: Sequence[Wanted]) -> Selection:
    """Choose the entries that stay of layers that hold all tokens of a text.

    Args:
        policy: Policy of the layers, of which `only_selects` is true.
        view: Entries of L * H regions, those of a layer together; column i is the token at position i. Of more than one
            layer the score must be `is_by_region`.
        wanted: The L layers.

    Raises:
        BudgetError: what must be protected does not fit.
    """
    assert policy.score is not None, "a policy that keeps everything makes no plan"
    n_layers, n = len(wanted), view.positions.shape[1]
    n_heads, device = len(view.positions) // n_layers, view.positions.device
    turn, spans = 0 if policy.every_step else view.turn, []
    protects = [policy.protected(one.budget, one.between) for one in wanted]
    for protect, one in zip(protects, wanted, strict=True):
        protect.check(one.budget)
        of_layer = protect.spans(view, one.budget, turn)
        spans.append([(max(begin, 0), min(max(end, 0), n)) for begin, end in of_layer])
    if not is_by_region(policy.score):
        (protect,), (one,) = protects, wanted
        pinned = protect.mask(view, one.budget, turn)
        view = replace(view, budget=one.budget, pinned=pinned)
    value = policy.value(view, n_layers).float()
    heads = policy.heads if isinstance(policy.heads, Ada) else None
    counts = np.repeat(np.array([[min(one.budget, n)] for one in wanted], dtype=np.int32), n_heads, 1)
    if heads is None:
        pins, there = _upload(device, spans, n_heads, counts.ravel())
    else:
        budgets = torch.tensor([one.budget for one in wanted])
        protected = torch.tensor([_length(of_layer) for of_layer in spans])
        least = heads.floor(protected, budgets).clamp(max=n).int().numpy()
        total = np.minimum(n_heads * budgets.numpy(), n_heads * n).astype(np.int32)
        pins, numbers = _upload(device, spans, n_heads, np.concatenate([least, total]))
        of_layers = value.view(n_layers, n_heads, n)
        there = ops.shared_counts(ShareArgs(of_layers, pins, numbers[:n_layers], numbers[n_layers:]))
        counts = ReadBack([there]).wait()[0].numpy().astype(np.int32)
        there = there.flatten()
    columns, is_nan = ops.best_columns(BestArgs(value, pins, there, int(counts.max())))
    numbers_of = zip(counts.astype(np.int64), wanted, strict=True)
    caps = np.stack([policy.caps(own, np.full_like(own, n), one.budget) for own, one in numbers_of])
    check = ScoreCheck(is_nan, [one.layer for one in wanted])
    return Selection(columns, counts, caps, check)


def _upload(
    device: torch.device, spans: Sequence[Sequence[tuple[int, int]]], n_heads: int, numbers: Ints
) -> tuple[Tensor, Tensor]:
    """Return spans as `BestArgs.pinned` takes them, and other numbers (n,), on a device.

    They go there in one copy.
    """
    most = max(len(of_layer) for of_layer in spans)
    pins = np.zeros((len(spans), most, 2), dtype=np.int32)
    for layer, of_layer in enumerate(spans):
        pins[layer, : len(of_layer)] = of_layer
    pins = pins.repeat(n_heads, 0)
    both = on_device(np.concatenate([pins.ravel(), numbers]), device)
    return both[: pins.size].view(*pins.shape), both[pins.size :]


def _length(spans: Sequence[tuple[int, int]]) -> int:
    """Return how many places lie in at least one of some spans."""
    length, reached = 0, 0
    for begin, end in sorted(spans):
        length += max(end - max(begin, reached), 0)
        reached = max(reached, end)
    return length
