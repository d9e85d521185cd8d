"""Dispatch of the ops to the implementation that supports their arguments: see `OpSet` for each op.

`reference` (plain torch, the truth, every dtype), `blockwise` (the same, prompts in blocks), `native` (C++ on the CPU:
float32, float16, bfloat16) and `gpu` (Triton) are op sets. MILLPOND_KERNELS=reference|native|gpu chooses one by force;
by default the fastest that can take the tensors runs.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import blockwise, reference
from millpond.kernels.args import (
    AttendArgs,
    AttendOutput,
    DecodeArgs,
    DecodeOutput,
    DecodeRowsArgs,
    EntryRows,
    HeadRuleArgs,
    MergeArgs,
    PaddedEntries,
    PageRegions,
    PrefillArgs,
    PrefillOutput,
    WindowSignalArgs,
)
from millpond.kernels.backends import NATIVE_DTYPES
from millpond.kernels.op_set import OpSet
from millpond.kernels.packed.regions import PackedRegions


def op_set(dtype: torch.dtype, device: torch.device) -> OpSet:
    """The implementation that serves pages, or queries, of this dtype on this device.

    Raises:
        OptionError: MILLPOND_KERNELS names an implementation that does not exist or cannot run here.
    """
    forced = os.environ.get("MILLPOND_KERNELS", "auto")
    if forced == "reference":
        return reference
    if forced == "gpu" or (forced == "auto" and device.type == "cuda"):
        from millpond.kernels import gpu

        return gpu if dtype in NATIVE_DTYPES else blockwise
    if forced not in ("auto", "native"):
        raise OptionError(f"MILLPOND_KERNELS={forced!r}: use auto, reference, native or gpu")
    fits = dtype in NATIVE_DTYPES and device.type == "cpu"
    if forced == "auto" and not fits:
        return blockwise
    from millpond.kernels import native

    if native.is_available():
        return native if fits else blockwise
    if forced == "native":
        raise OptionError("MILLPOND_KERNELS=native, but this install has no native kernels; reinstall with a compiler")
    return blockwise


def decode(args: DecodeArgs) -> DecodeOutput:
    """See `OpSet.decode`.

    Raises:
        OptionError: plain and packed regions that do not fit.
    """
    regions = args.regions
    if regions.packed is not None:
        regions.packed.check(regions.plain.table.shape[0], regions.plain.pages.key_dim)
    return op_set(regions.plain.pages.dtype, args.q.device).decode(args)


def decode_rows(args: DecodeRowsArgs) -> AttendOutput:
    """See `OpSet.decode_rows`."""
    return op_set(args.regions.pages.dtype, args.q.device).decode_rows(args)


def attend(args: AttendArgs) -> AttendOutput:
    """See `OpSet.attend`."""
    return op_set(args.regions.pages.dtype, args.q.device).attend(args)


def prefill(args: PrefillArgs) -> PrefillOutput:
    """See `OpSet.prefill`."""
    return op_set(args.q.dtype, args.q.device).prefill(args)


def window_signal(args: WindowSignalArgs) -> Tensor:
    """See `OpSet.window_signal`."""
    return op_set(args.q.dtype, args.q.device).window_signal(args)


def write(regions: PageRegions, rows: EntryRows) -> None:
    """See `OpSet.write`.

    Raises:
        OptionError: log masses for pages that have none.
    """
    if rows.log_masses is not None and not regions.pages.masses:
        raise OptionError(
            "log_masses were given for pages that keep no masses; make the pool with masses=True, or pass None"
        )
    op_set(regions.pages.dtype, regions.device).write(regions, rows)


def read(regions: PageRegions, width: int) -> PaddedEntries:
    """See `OpSet.read`."""
    return op_set(regions.pages.dtype, regions.device).read(regions, width)


def write_packed(regions: PackedRegions, rows: EntryRows) -> None:
    """See `OpSet.write_packed`.

    Raises:
        OptionError: a start or a count that would cut a group; log masses for pages that have none; regions that lack
            what their layout needs.
    """
    grain = regions.pages.layout.grain
    if grain > 1:
        for name, given in (("start", rows.start), ("count", rows.count)):
            bad = given[given % grain != 0]
            if len(bad):
                raise OptionError(
                    f"{name}={int(bad[0])} would cut a group: this layout is written in runs of {grain} slots"
                )
    if rows.log_masses is not None and not regions.pages.masses:
        raise OptionError("log_masses were given for packed pages that keep no masses; make the pool with masses=True")
    regions.check_stored(len(rows.start))
    dtype = rows.keys.dtype if rows.keys.dtype in NATIVE_DTYPES else torch.float32
    op_set(dtype, regions.table.device).write_packed(regions, rows)


def read_packed(regions: PackedRegions, width: int, head_dim: int) -> PaddedEntries:
    """See `OpSet.read_packed`."""
    return op_set(torch.float32, regions.table.device).read_packed(regions, width, head_dim)


def merge_slots(args: MergeArgs) -> None:
    """See `OpSet.merge_slots`."""
    op_set(args.regions.pages.dtype, args.regions.device).merge_slots(args)


def admit(args: HeadRuleArgs) -> bool:
    """See `OpSet.admit`."""
    return op_set(args.regions.pages.dtype, args.regions.device).admit(args)


def absolute_sums(x: Tensor, y: Tensor) -> Tensor:
    """See `OpSet.absolute_sums`."""
    return op_set(x.dtype, x.device).absolute_sums(x, y)


def newest_alike(keys: Tensor, lens: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor]:
    """See `OpSet.newest_alike`."""
    return op_set(keys.dtype, keys.device).newest_alike(keys, lens, threshold, most)
