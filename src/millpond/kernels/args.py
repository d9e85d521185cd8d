"""Arguments and results of the ops: the one place for their shapes, dtypes and units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import KEEP_ALL, DecodeRule, Reduce
from millpond.kernels.merge.rules import MergeRule
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.pages import PageArrays


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Settings of one layer's attention.

    Attributes:
        scale: Factor on q.k.
        softcap: 0 or c, logits become c * tanh(logit / c).
        window: 0 for none, or w: an entry is visible while q_pos - position < w.
        sink_logits: (Hq,) float32 or None: a logit per query head that only enters the denominator (gpt-oss).
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    sink_logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PageRegions:
    """Entries of R regions in plain pages, those of region r in its slots 0 .. lens[r] - 1.

    Attributes:
        pages: Memory of the pool.
        table: (R, n) int32 page ids.
        lens: (R,) int32 slots in use.
    """

    pages: PageArrays
    table: Tensor
    lens: Tensor

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def parts(self) -> tuple[PageArrays, Tensor, Tensor]:
        """Return pages, table and lens."""
        return self.pages, self.table, self.lens


@dataclass(frozen=True, slots=True)
class StepRegions:
    """Regions R = S * Hkv of one layer and the rules of a decoding step of S sequences.

    Attributes:
        plain: Entries in plain pages; memory and `lens` are written. A page for slot lens[r] must exist wherever a
            region may grow.
        caps: (R,) int32, most entries a region may hold; at least 1. Entries of both parts count, tombstones do not.
        recent: (R,) int32, how many of the newest positions are protected.
        q_pos: (S,) int32, the position of the new token in its own text; -1: this sequence takes no part (its output is
            zero, its lse -inf, nothing is stored).
        rule: Scores and eviction of the step.
        shape: Settings of the attention.
        packed: Entries in packed pages, or None. Side arrays and `dead` are written; codes never.
        kept: (S, n, 2) int32, spans [begin, end) of positions that never leave, empty ones at the end, or None.
        least: (S, m, 3) int32, disjoint spans [begin, end) of positions and the fewest entries of each that stay in
            every region, at most `MOST_LEAST`, or None. If a region holds no more, none of them leaves.
    """

    plain: PageRegions
    caps: Tensor
    recent: Tensor
    q_pos: Tensor
    rule: DecodeRule
    shape: AttentionShape
    packed: PackedRegions | None = None
    kept: Tensor | None = None
    least: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MergeArgs:
    """Regions of S sequences, and the merge of the entries beyond their caps.

    Attributes:
        regions: Regions; memory and lens are written.
        caps: (R,) int32, see `StepRegions`.
        recent: (R,) int32, see `StepRegions`.
        q_pos: (S,) int32, the newest position of each sequence; -1 if it takes no part.
        memory: (S,) float64, the threshold of each sequence that a rule moves, NaN for none; written.
        leave: Eviction rule. Its signal, reduce, decay and shared mean nothing here.
        rule: Merge of the evicted entries.
        local: (R, n) float32 or None, by slot: the attention of the latest queries. The value of an entry is then
            max(acc, local * sum acc / sum local), with the sums over the region, whatever `leave` says.
    """

    regions: PageRegions
    caps: Tensor
    recent: Tensor
    q_pos: Tensor
    memory: Tensor
    leave: DecodeRule
    rule: MergeRule
    local: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadRuleArgs:
    """Regions of S sequences, and the inputs of the rule of each KV head.

    Attributes:
        regions: Regions; memory and lens are written.
        sequences: (n,) int64, the sequences to read.
        ids: (S, width) int64, the token id at each position.
        classes: (c,) int8, the class of each token id, the last for all ids beyond.
        kinds: (R,) int64, the rule of each region.
        local: (R,) int32, newest positions that a local rule keeps.
        seen: (n,) int64, tokens of each sequence so far.
        quota: (n,) int64, frequent entries of a head of each sequence.
        most: (n,) int64, most entries of all heads of a sequence together.
        sinks: Positions below count as special.
        window: 0 for none, or w: entries w after the next query leave.
        bounded: Whether some of the sequences may come to hold as many entries as `most`.
    """

    regions: PageRegions
    sequences: Tensor
    ids: Tensor
    classes: Tensor
    kinds: Tensor
    local: Tensor
    seen: Tensor
    quota: Tensor
    most: Tensor
    sinks: int
    window: int
    bounded: bool

    @property
    def device(self) -> torch.device:
        return self.regions.device


class OfQueries:
    """Arguments of an op that runs on the device of its queries."""

    __slots__ = ()
    q: Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device


class AttendOutput(NamedTuple):
    """Output of attention over given entries alone, and its log-sum-exp."""

    out: Tensor  #: (S, Hq, value_dim), float32 or of the dtype of the queries
    lse: Tensor  #: (S, Hq) float32, -inf where there is no entry, and then out is 0


@dataclass(frozen=True, slots=True)
class AttendArgs(OfQueries):
    """Queries of S sequences, and entries that they share.

    Attributes:
        q: (S, Hq, key_dim), one query of each sequence.
        regions: The R = Hkv regions of the shared entries, only read.
        scale: See `AttentionShape`.
        softcap: See `AttentionShape`.
        members: (n,) int64, the sequences that share the entries and see every one, each once; None for all.
        partial: Output and log-sum-exp of the queries over other entries, both contiguous; changed in place and
            returned. None if there are none.

    Raises:
        OptionError: `partial` is not contiguous, of these shapes and dtypes.
    """

    q: Tensor
    regions: PageRegions
    scale: float
    softcap: float = 0.0
    members: Tensor | None = None
    partial: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.partial is None:
            return
        shape = (*self.q.shape[:2], self.regions.pages.value_dim)
        _check(self.partial[0], shape, (torch.float32, self.q.dtype))
        _check(self.partial[1], shape[:2], (torch.float32,))


def _check(tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise OptionError(
            f"what queries found is contiguous float32 of shape {tuple(shape)}, not {tensor.dtype} of "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}; make it .float().contiguous()"
        )


@dataclass(frozen=True, slots=True)
class DecodeArgs(OfQueries):
    """New token of each of S sequences, and the regions that it attends to.

    Attributes:
        q: (S, Hq, key_dim), query heads grouped by KV head: query head h reads KV head h // (Hq // Hkv).
        k_new: (S, Hkv, key_dim).
        v_new: (S, Hkv, value_dim).
        regions: Regions of the layer; written.
        angles: Cosines and sines (S, dim) by which `q` and `k_new` are rotated first, as by `DecoderOps.rotate_`; their
            memory may be written over. None: they are as they should be. Only `ops.decode` and the kernels of a GPU
            take them.
    """

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    regions: StepRegions
    angles: tuple[Tensor, Tensor] | None = None


class SharedRegions(NamedTuple):
    """Entries that several sequences of a step share."""

    members: Tensor  #: (n,) int64, the sequences that share them and see every one, each once
    regions: PageRegions  #: the R = Hkv regions of the entries, only read


@dataclass(frozen=True, slots=True)
class SharedDecodeArgs(OfQueries):
    """Step without eviction and scores, of sequences that share entries.

    Attributes:
        step: New tokens and the entries of each sequence alone, all in plain pages, without a window; the rule is
            `KEEP_ALL`. Its regions hold none of the shared entries; their `lens` are written.
        shared: Shared entries.

    Raises:
        OptionError: a step that scores, evicts, has a window or packed pages.
    """

    step: DecodeArgs
    shared: tuple[SharedRegions, ...]

    def __post_init__(self) -> None:
        regions = self.step.regions
        if regions.rule != KEEP_ALL or regions.shape.window or regions.packed is not None:
            raise OptionError(
                "entries are shared by steps that keep all entries in plain pages, without scores and windows; "
                "take KEEP_ALL, window=0 and no packed part, or decode without shared entries"
            )

    @property
    def q(self) -> Tensor:  # type: ignore[override]
        return self.step.q


class DecodeOutput(NamedTuple):
    """Attention output, and the evicted entries."""

    out: Tensor  #: (S, Hq, value_dim) in q's dtype
    lse: Tensor  #: (S, Hq) float32, the log of the denominator (sink included)
    evicted: Tensor  #: (R,) int32: the position that left, -1 if none did


@dataclass(frozen=True, slots=True)
class DecodeRowsArgs(OfQueries):
    """A few new tokens of each of S sequences, in n columns, and the regions that they join.

    Attributes:
        q: (S, Hq, n, key_dim), query heads grouped by KV head as for `DecodeArgs`.
        k_new: (S, Hkv, n, key_dim).
        v_new: (S, Hkv, n, value_dim).
        regions: The R = S * Hkv regions of the layer, all in plain pages; memory and `lens` are written. Pages for all
            new entries must be there.
        q_pos: (S, n) int32, the position of each token in its own text, rising along a row; -1: no token here.
        shape: Settings of the attention.
    """

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    regions: PageRegions
    q_pos: Tensor
    shape: AttentionShape


class PaddedEntries(NamedTuple):
    """Entries read out of pages, padded to one width.

    Padding has position -1, and so has a tombstone.
    """

    keys: Tensor  #: (R, width, key_dim); of packed pages float32, channels that were dropped are zero
    values: Tensor  #: (R, width, value_dim); of packed pages float32
    positions: Tensor  #: (R, width) int32
    scores: Tensor  #: (R, width) float32
    log_masses: Tensor | None = None  #: (R, width) float32; None where the pages have no masses


def joined(parts: Sequence[PaddedEntries]) -> PaddedEntries:
    """Return the columns of several runs of entries of the same regions, concatenated.

    All have masses, or none.
    """
    columns = list(zip(*parts, strict=True))[:4]
    keys, values, positions, scores = (torch.cat(column, 1) for column in columns)
    masses = [part.log_masses for part in parts if part.log_masses is not None]
    return PaddedEntries(keys, values, positions, scores, torch.cat(masses, 1) if masses else None)


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Rows to store in R regions: row index[r, i] goes to slot start[r] + i, i < count[r].

    Attributes:
        start: (R,) int32, first slot; of packed pages a multiple of `layout.grain`.
        count: (R,) int32, rows; of packed pages a multiple of `layout.grain`: a group is written once, as a whole.
        index: (R, width) int32, entries past count[r] are ignored.
        keys: (R, N, key_dim): any strides with contiguous rows; cast to the pages' dtype. For packed pages all
            channels, as the model made them.
        values: (R, N, value_dim), likewise.
        positions: (R, N) int32 (may be expanded).
        scores: (R, N) float32, zero if None.
        log_masses: (R, N) float32, zero if None; only for pages with masses.
        on_host: `start` and `count` on the host, where they are known there: nobody reads them back then.
    """

    start: Tensor
    count: Tensor
    index: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor | None = None
    log_masses: Tensor | None = None
    on_host: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None = None


@dataclass(frozen=True, slots=True)
class PrefillArgs(OfQueries):
    """Q new queries of one sequence, and N = n_past + Q columns.

    Stored entries, all older than every query, come first, then the new ones.

    Attributes:
        q: (Hq, Q, key_dim).
        k: (Hkv, N, key_dim).
        v: (Hkv, N, value_dim); any strides.
        q_pos: (Q,) int32, positions of the new tokens, ascending.
        shape: Settings of the attention.
        past_pos: (Hkv, n_past) or (1, n_past) int32, positions of the stored entries, -1 for none (ragged heads); None
            if nothing is stored.
        past_log_masses: (Hkv or 1, n_past) float32, added to the logits of the stored entries after the softcap; None
            for 0.
        colsum: Reduction of the query heads of a group in the column sums; None for no sums.
        decay: Factor on the column sums of all earlier queries at each query, above 0 to 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_pos: Tensor
    shape: AttentionShape
    past_pos: Tensor | None = None
    past_log_masses: Tensor | None = None
    colsum: Reduce | None = None
    decay: float = 1.0


class PrefillOutput(NamedTuple):
    """Output of the queries, and the attention that the columns received.

    colsum[g, j] = sum_i decay**(Q - 1 - i) reduce_h A[h, i, j] over the queries i and the query heads h of KV head g.
    """

    out: Tensor  #: (Hq, Q, value_dim) in q's dtype
    lse: Tensor  #: (Hq, Q) float32, the log of the denominator (sink included)
    colsum: Tensor | None  #: (Hkv, N) float32, or None


@dataclass(frozen=True, slots=True)
class WindowSignalArgs(OfQueries):
    """A few queries w of one sequence, and N entries in any order.

    Attributes:
        q: (Hq, w, key_dim).
        k: (Hkv, N, key_dim).
        q_pos: (w,) int32.
        k_pos: (Hkv, N) int32, -1 for none.
        shape: Settings of the attention.
        reduce: Reduction of the query heads of a group.
        log_masses: (Hkv or 1, N) float32 or None, added to the logits of the entries.
        lse: (Hq, w) float32, the log of each denominator, if it is known, sink included; the window then hides entries
            and leaves the others what they had.
    """

    q: Tensor
    k: Tensor
    q_pos: Tensor
    k_pos: Tensor
    shape: AttentionShape
    reduce: Reduce = Reduce.MEAN
    log_masses: Tensor | None = None
    lse: Tensor | None = None


Numbers = npt.NDArray[np.int64]


class RunsInBuffer(NamedTuple):
    """Runs of pages in a buffer, each of them array after array.

    All (n,) int64.

    Attributes:
        places: First byte of each run.
        n_pages: Pages of each run.
        generations: Start value of the checksum of each run.
        checksums: CRC-32 of the bytes of each run.
    """

    places: Numbers
    n_pages: Numbers
    generations: Numbers
    checksums: Numbers


class WantedPages(NamedTuple):
    """Pages of runs to read, those of a run together.

    Both int64.

    Attributes:
        rows: (m,) row of the page in its run.
        ids: (m,) page of a pool that it becomes.
    """

    rows: Numbers
    ids: Numbers
