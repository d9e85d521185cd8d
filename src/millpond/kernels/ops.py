"""The ops: their protocol `OpSet`, and their dispatch to the implementation that supports the arguments."""

from __future__ import annotations

import os
from typing import Protocol

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
    SharedDecodeArgs,
    WindowSignalArgs,
)
from millpond.kernels.backends import NATIVE_DTYPES, gpu_for
from millpond.kernels.block_args import BlockSumsArgs
from millpond.kernels.decoder_ops import turned
from millpond.kernels.eager.packed_pages import write_across_heads
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.selection_args import Best, BestArgs, MoveArgs, ShareArgs
from millpond.kernels.window_args import PagedWindowArgs


class OpSet(Protocol):
    """Ops of `reference`, `blockwise`, `native` and `gpu`, and of `ops`, which chooses."""

    def decode(self, args: DecodeArgs) -> DecodeOutput:
        """Run one decoding step of one layer: attend, add to scores, choose the victim, store.

        Each query attends to the stored entries of its region and to the new one. A region that holds fewer entries
        than its cap (or whose rule never evicts) stores the new entry in slot lens[r]; a full one drops the entry of
        lowest value among the stored and the new one, and the new entry takes its slot (or is itself the one that
        leaves). Where the pages have masses, the log mass of a stored entry is added to its logit (after the softcap);
        the new entry has log mass 0. A region never holds more than its cap.

        Value of an entry: see `Evict`. Never chosen while another can be: position < rule.sinks, the `recent[r]`
        newest positions (q_pos - position < recent[r]), and those in `kept` spans of their sequence. Chosen first: what
        the sliding window hides from the next query.

        Regions of two parts have one softmax, one score update and one victim over both. The new entry is stored in
        the plain part: it is appended where the region holds fewer entries than its cap; where the victim is packed,
        the victim's slot becomes a tombstone and the new entry is appended.
        """
        ...

    def decode_rows(self, args: DecodeRowsArgs) -> AttendOutput:
        """Return the output of a few new tokens of each sequence.

        It is as if they were decoded one after another with nothing scored and nothing evicted. Token i of a sequence
        attends to the stored entries and to the tokens up to itself, and each result has the bits that `decode` gives
        for it where it comes alone. All are stored, in order, after the stored entries.

        Returns:
            (S, Hq, n, value_dim) in q's dtype, 0 where there is no token; lse (S, Hq, n), there -inf.
        """
        ...

    def decode_shared(self, args: SharedDecodeArgs) -> AttendOutput:
        """Run a step over own entries and shared ones, which are read once.

        Results are those of `decode` over all entries of each sequence, but for the order of sums. The partition is
        that of ChunkAttention (Ye et al., 2024, section 3.2). Where the kernels of the CPU run, both parts are tiles of
        one parallel loop, put together once (BatchLLM, Zheng et al., 2024, section 4.3); elsewhere `decode` and then
        `attend` for each run.

        Returns:
            (S, Hq, value_dim) in q's dtype, 0 where a sequence takes no part; lse (S, Hq), there -inf.
        """
        ...

    def attend(self, args: AttendArgs) -> AttendOutput:
        """Attend from many sequences' queries to shared entries, read once for all of them.

        The first of the two phases of ChunkAttention (Ye et al., 2024, section 3.2). The output of `decode` over the
        entries of each sequence alone is given as `partial`, and put together with it by the log-sum-exp, as
        `lse_merge` does.
        """
        ...

    def prefill(self, args: PrefillArgs) -> PrefillOutput:
        """Attend causally from many new queries of one sequence, with column sums of attention.

        No (Q, N) matrix is kept: the work runs in blocks of query rows (but for `reference`).
        """
        ...

    def window_signal(self, args: WindowSignalArgs) -> Tensor:
        """Return (Hkv, N) float32: the attention that a few queries pay to each entry.

        It is sum_i reduce_h A[h, i, j] over the queries i, each seeing every entry that is not newer. A query that sees
        nothing adds nothing.
        """
        ...

    def window_sums(self, args: PagedWindowArgs) -> Tensor:
        """Return (R, width) float32: `window_signal` of many regions at once.

        Their entries are in pages. Column j is slot j of a region, 0 where it has no entry. The results are those of
        `window_signal` over the same entries, but for the order of sums. On a GPU the pages are read where they are;
        nothing waits for the device.
        """
        ...

    def block_sums(self, args: BlockSumsArgs) -> None:
        """Add the attention of one query of each sequence to the sums of its entries.

        Entry j of a sequence gathers reduce_h A[h, j] of its KV head's query heads; what it had before is multiplied by
        the decay first. The newest entry, the query's own, had nothing.
        """
        ...

    def write(self, regions: PageRegions, rows: EntryRows) -> None:
        """Store rows in plain pages; `regions.lens` is neither read nor written."""
        ...

    def read(self, regions: PageRegions, width: int) -> PaddedEntries:
        """Copy the entries of every region out of its plain pages, padded to `width` >= max(lens)."""
        ...

    def read_scores(self, regions: PageRegions, width: int) -> Tensor:
        """Return the scores in slots of plain pages, (R, width) float32.

        They are 0 without an entry. width: see `read`.
        """
        ...

    def write_packed(self, regions: PackedRegions, rows: EntryRows) -> None:
        """Encode rows into packed pages; `lens` and `dead` are neither read nor written.

        Raises:
            NumericsError: NaN, infinity, or a number beyond what the format's scales can hold. What `start` and `count`
                name may be half written; nothing else is touched.
        """
        ...

    def read_packed(self, regions: PackedRegions, width: int, head_dim: int) -> PaddedEntries:
        """Return the entries of every region as numbers, padded to `width` >= max(lens).

        Keys have `head_dim` channels.
        """
        ...

    def merge_slots(self, args: MergeArgs) -> None:
        """Evict entries of lowest value beyond the caps of regions, merging them into kept ones.

        Runs after a decoding step, over the same regions, caps, recent and q_pos as `decode`. Region r evicts lens[r] -
        caps[r] entries, none if that is not above 0. Value and protection are those of `decode`; of equal ones the
        oldest is evicted. `MergeRule` says how they are merged; kept entries keep their positions. The last entries of
        a region move into the freed slots.
        """
        ...

    def best_columns(self, args: BestArgs) -> Best:
        """Return the entries of regions that stay: pinned ones first, then those of highest value.

        Of equal values the newest stay. NaN has no order.
        """
        ...

    def shared_counts(self, args: ShareArgs) -> Tensor:
        """Return (L, H) int32: how many entries the heads of layers keep that compete.

        The rule is that of Ada-KV (arXiv:2407.11550). Every head keeps its best `least`, pinned ones first; what is
        left of `total` goes to the highest values of all heads together. Of equal values the first heads keep theirs,
        the newest first.
        """
        ...

    def move_entries(self, args: MoveArgs) -> None:
        """Copy entries of regions to the first slots of their pages, or of others.

        All that is stored of them goes along.
        """
        ...

    def admit(self, args: HeadRuleArgs) -> bool:
        """Evict the entries that no rule of their head keeps, and close the gaps.

        It does what `HeadRules.leaving` decides after a step.

        Returns:
            False where there is no kernel for it: then nothing was done.
        """
        ...

    def absolute_sums(self, x: Tensor, y: Tensor) -> Tensor:
        """Return sum_m |x_j . y_m| of each entry j with all vectors m of its head.

        None of the products is kept.

        Args:
            x: (H, N, dim).
            y: (H * sets, n, dim), the sets of head h are h * sets, h * sets + 1, ...

        Returns:
            (H, N) float32.
        """
        ...

    def newest_alike(self, keys: Tensor, lens: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor]:
        """Return for each key the last others of its head with a cosine above the threshold.

        Args:
            keys: (H, N, dim).
            lens: (H,) int32, keys of each head.
            threshold: Cosine that must be exceeded.
            most: Most keys to return for each key.

        Returns:
            their columns (H, N, most) int32, the last one first, -1 for none; their cosines (H, N, most) float32, 0 for
            none.
        """
        ...


def op_set(dtype: torch.dtype, device: torch.device) -> OpSet:
    """Return the implementation that serves pages, or queries, of this dtype on this device.

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
    """Run `OpSet.decode`.

    Raises:
        OptionError: plain and packed regions that do not fit.
    """
    regions = args.regions
    if regions.packed is not None:
        regions.packed.check(regions.plain.table.shape[0], regions.plain.pages.key_dim)
    kernels = op_set(regions.plain.pages.dtype, args.q.device)
    turns = kernels is gpu_for(regions.plain.pages.dtype, args.q.device)
    return kernels.decode(args if turns else turned(args))


def decode_rows(args: DecodeRowsArgs) -> AttendOutput:
    """Run `OpSet.decode_rows`."""
    return op_set(args.regions.pages.dtype, args.q.device).decode_rows(args)


def decode_shared(args: SharedDecodeArgs) -> AttendOutput:
    """Run `OpSet.decode_shared`."""
    return op_set(args.step.regions.plain.pages.dtype, args.q.device).decode_shared(args)


def attend(args: AttendArgs) -> AttendOutput:
    """Run `OpSet.attend`."""
    return op_set(args.regions.pages.dtype, args.q.device).attend(args)


def prefill(args: PrefillArgs) -> PrefillOutput:
    """Run `OpSet.prefill`."""
    return op_set(args.q.dtype, args.q.device).prefill(args)


def window_signal(args: WindowSignalArgs) -> Tensor:
    """Run `OpSet.window_signal`."""
    return op_set(args.q.dtype, args.q.device).window_signal(args)


def window_sums(args: PagedWindowArgs) -> Tensor:
    """Run `OpSet.window_sums`."""
    return op_set(args.regions.pages.dtype, args.q.device).window_sums(args)


def block_sums(args: BlockSumsArgs) -> None:
    """Run `OpSet.block_sums`."""
    op_set(args.q.dtype, args.q.device).block_sums(args)


def write(regions: PageRegions, rows: EntryRows) -> None:
    """Run `OpSet.write`.

    Raises:
        OptionError: log masses for pages that have none.
    """
    if rows.log_masses is not None and not regions.pages.masses:
        raise OptionError(
            "log_masses were given for pages that keep no masses; make the pool with masses=True, or pass None"
        )
    op_set(regions.pages.dtype, regions.device).write(regions, rows)


def read(regions: PageRegions, width: int) -> PaddedEntries:
    """Run `OpSet.read`."""
    return op_set(regions.pages.dtype, regions.device).read(regions, width)


def read_scores(regions: PageRegions, width: int) -> Tensor:
    """Run `OpSet.read_scores`."""
    return op_set(regions.pages.dtype, regions.device).read_scores(regions, width)


def write_packed(regions: PackedRegions, rows: EntryRows) -> None:
    """Run `OpSet.write_packed`.

    Raises:
        OptionError: a start or a count that would cut a group; log masses for pages that have none; regions that lack
            what their layout needs.
    """
    grain = regions.pages.layout.grain
    if grain > 1:
        start, count = rows.on_host or (rows.start.cpu().numpy(), rows.count.cpu().numpy())
        for name, indices in (("start", start), ("count", count)):
            bad = indices[indices % grain != 0]
            if len(bad):
                raise OptionError(
                    f"{name}={int(bad[0])} would cut a group: this layout is written in runs of {grain} slots"
                )
    if rows.log_masses is not None and not regions.pages.masses:
        raise OptionError("log_masses were given for packed pages that keep no masses; make the pool with masses=True")
    regions.check_stored(len(rows.start))
    dtype = rows.keys.dtype if rows.keys.dtype in NATIVE_DTYPES else torch.float32
    if regions.pages.layout.key.across_heads or regions.pages.layout.value.across_heads:
        write_across_heads(regions, rows)
        return
    op_set(dtype, regions.table.device).write_packed(regions, rows)


def read_packed(regions: PackedRegions, width: int, head_dim: int) -> PaddedEntries:
    """Run `OpSet.read_packed`."""
    return op_set(torch.float32, regions.table.device).read_packed(regions, width, head_dim)


def merge_slots(args: MergeArgs) -> None:
    """Run `OpSet.merge_slots`."""
    op_set(args.regions.pages.dtype, args.regions.device).merge_slots(args)


def best_columns(args: BestArgs) -> Best:
    """Run `OpSet.best_columns`."""
    return op_set(args.value.dtype, args.device).best_columns(args)


def shared_counts(args: ShareArgs) -> Tensor:
    """Run `OpSet.shared_counts`."""
    return op_set(args.value.dtype, args.device).shared_counts(args)


def move_entries(args: MoveArgs) -> None:
    """Run `OpSet.move_entries`."""
    op_set(args.source.pages.dtype, args.device).move_entries(args)


def admit(args: HeadRuleArgs) -> bool:
    """Run `OpSet.admit`."""
    return op_set(args.regions.pages.dtype, args.regions.device).admit(args)


def absolute_sums(x: Tensor, y: Tensor) -> Tensor:
    """Run `OpSet.absolute_sums`."""
    return op_set(x.dtype, x.device).absolute_sums(x, y)


def newest_alike(keys: Tensor, lens: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor]:
    """Run `OpSet.newest_alike`."""
    return op_set(keys.dtype, keys.device).newest_alike(keys, lens, threshold, most)
