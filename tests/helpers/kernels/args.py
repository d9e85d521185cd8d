"""Arguments of the ops from flat lists, for the kernel tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from millpond.kernels.args import (
    AttentionShape,
    DecodeArgs,
    EntryRows,
    PageRegions,
    PrefillArgs,
    StepRegions,
    WindowSignalArgs,
)
from millpond.kernels.decode_rules import DecodeRule
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.pages import PageArrays

#: What belongs to an `AttentionShape`.
SHAPE = ("scale", "softcap", "window", "sink_logits")


def shape_of(settings: dict[str, Any]) -> AttentionShape:
    """Takes what belongs to the shape out of keyword arguments."""
    return AttentionShape(**{name: settings.pop(name) for name in SHAPE if name in settings})


def decode_args(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    pages: PageArrays,
    table: Tensor,
    lens: Tensor,
    caps: Tensor,
    recent: Tensor,
    q_pos: Tensor,
    rule: DecodeRule,
    packed: PackedRegions | None = None,
    **shape: Any,
) -> DecodeArgs:
    plain = PageRegions(pages, table, lens)
    regions = StepRegions(plain, caps, recent, q_pos, rule, AttentionShape(**shape), packed)
    return DecodeArgs(q, k_new, v_new, regions)


def prefill_args(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, past_pos: Tensor | None = None, **settings: Any
) -> PrefillArgs:
    shape = shape_of(settings)
    return PrefillArgs(q, k, v, q_pos, shape, past_pos, **settings)


def window_args(q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, **settings: Any) -> WindowSignalArgs:
    shape = shape_of(settings)
    return WindowSignalArgs(q, k, q_pos, k_pos, shape, **settings)


def write_args(pages: PageArrays, table: Tensor, start: Tensor, *rows: Any) -> tuple[PageRegions, EntryRows]:
    """`rows`: the rest of `EntryRows`."""
    return PageRegions(pages, table, start), EntryRows(start, *rows)
