"""The regions of decoding steps in places that stay: a recorded step reads and writes always the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from millpond.kernels.args import StepRegions
from millpond.kernels.packed.regions import PackedRegions

#: Columns of page tables are a multiple of this, and a quarter more than there are.
WIDTH_STEP = 16


class StepInputs:
    """Places for what is new in a step of some layers.

    Page ids, budgets and lengths are copied in before a step, lengths and counts of the dead back behind it: so pages
    may be added or sealed, and other sequences take the places of those that end.

    Args:
        regions: of a step of each layer, for whose sizes places are made.

    Attributes:
        regions: the same with these places, in which no sequence takes part until `take`.
    """

    def __init__(self, regions: Sequence[StepRegions]) -> None:
        self._q_pos = torch.full_like(regions[0].q_pos, -1)
        self.regions = [_placed(one, self._q_pos) for one in regions]
        self._copied: list[tuple[Tensor, ...]] = [()] * len(regions)

    def holds(self, regions: Sequence[StepRegions]) -> bool:
        """Whether the tables of a step are no wider than the places for them."""
        return all(
            table.shape[1] <= own.shape[1]
            for one, place in zip(regions, self.regions, strict=True)
            for table, own in zip(_tables(one), _tables(place), strict=True)
        )

    def take(self, regions: Sequence[StepRegions]) -> None:
        """Copy those of a step. What is a tensor of its own whenever it changes is copied only then."""
        self._q_pos.copy_(regions[0].q_pos)
        for n, one in enumerate(regions):
            given = _given(one)
            if len(given) == len(self._copied[n]) and all(map(_is, given, self._copied[n])):
                continue
            for tensor, own in zip(given, _given(self.regions[n]), strict=True):
                (own if tensor.ndim == 1 else own[:, : tensor.shape[1]]).copy_(tensor)
            self._copied[n] = given
        _copy(_written(self.regions), _written(regions))

    def give_back(self, regions: Sequence[StepRegions]) -> None:
        """Copy back what the step has written besides pages."""
        _copy(_written(regions), _written(self.regions))


def key_of(regions: Sequence[StepRegions]) -> tuple[Any, ...] | None:
    """What a recorded step has noted by its address or value; None for steps that wait for the device."""
    numbers: list[float] = [len(regions[0].q_pos)]
    found: list[Any] = []
    for one in regions:
        if one.kept is not None or one.least is not None:
            return None
        numbers += (one.shape.scale, one.shape.softcap, one.shape.window, bool(one.plain.pages.n_arenas))
        found += (one.plain.pages, one.plain.pages.bases, one.rule, one.shape.sink_logits)
        if one.packed is not None:
            packed = one.packed
            numbers.append(bool(packed.pages.n_arenas))
            found += (packed.pages, packed.pages.bases, packed.channels, packed.balance, packed.key_scales, packed.rope)
    return numbers, *found


def same_key(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two steps have as many sequences, in the same pages, under the same rules."""
    return len(key) == len(other) and bool(key[0] == other[0]) and all(map(_is, key[1:], other[1:]))


def _is(one: object, other: object) -> bool:
    return one is other


def _placed(one: StepRegions, q_pos: Tensor) -> StepRegions:
    plain = replace(one.plain, table=_wider(one.plain.table), lens=one.plain.lens.clone())
    packed = None if one.packed is None else _placed_codes(one.packed)
    return replace(one, plain=plain, caps=one.caps.clone(), recent=one.recent.clone(), q_pos=q_pos, packed=packed)


def _placed_codes(packed: PackedRegions) -> PackedRegions:
    return replace(packed, table=_wider(packed.table), lens=packed.lens.clone(), dead=packed.dead.clone())


def _wider(table: Tensor) -> Tensor:
    """(R, n) with the page ids of a table (R, <= n) and room for some more."""
    wanted = table.shape[1] * 5 // 4
    found = table.new_zeros(len(table), -(-max(wanted, 1) // WIDTH_STEP) * WIDTH_STEP)
    found[:, : table.shape[1]] = table
    return found


def _tables(one: StepRegions) -> list[Tensor]:
    return [one.plain.table] if one.packed is None else [one.plain.table, one.packed.table]


def _given(one: StepRegions) -> tuple[Tensor, ...]:
    """What is another tensor whenever the host changes it."""
    own = (one.plain.table, one.caps, one.recent)
    return own if one.packed is None else (*own, one.packed.table, one.packed.lens)


def _written(regions: Sequence[StepRegions]) -> list[Tensor]:
    """What a step writes besides pages."""
    return [t for one in regions for t in (one.plain.lens, *(() if one.packed is None else (one.packed.dead,)))]


def _copy(to: list[Tensor], of: list[Tensor]) -> None:
    torch._foreach_copy_(to, of)
