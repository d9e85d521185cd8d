"""The ops over packed pages: signatures, checks and dispatch. Words and meaning of `decode`: see `kernels.ops`.

A region has two parts: entries in plain pages (sinks, the residual window, whatever is newest) and sealed ones in
packed pages. Either may be empty. Codes are written once and read until their page is freed. A packed entry that is
evicted leaves a *tombstone*: position -1 in its slot, which attention and scores skip from then on; the `dead` of
`PackedRegions` counts them. A page is freed when all its slots are dead. Where a group spans several slots
(`layout.grain` > 1) the survivors of different groups cannot share scales without being encoded again, so they stay.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import packed_reference
from millpond.kernels.backends import NATIVE_DTYPES, backend
from millpond.kernels.decode_rules import DecodeRule
from millpond.kernels.ops import PaddedEntries
from millpond.kernels.packed.layout import PackedLayout
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.pages import PageArrays


def _backend(dtype: torch.dtype, device: torch.device) -> ModuleType:
    """The implementation that serves packed pages beside plain ones of this dtype."""
    return _beside(backend(dtype, device).__name__)


@cache
def _beside(name: str) -> ModuleType:
    """The ops over packed pages that go with the ops of this name over plain ones."""
    if name == "millpond.kernels.gpu":
        from millpond.kernels.gpu import packed as on_gpu

        return on_gpu
    if name != "millpond.kernels.native":
        return packed_reference
    from millpond.kernels.native import packed

    return packed


def decode(
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
    packed: PackedRegions,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.decode` over regions of two parts: one softmax, one score update and one victim over both.

    `caps` and `recent` count the entries of both parts, tombstones excluded. The new entry is stored in the plain part:
    it is appended where the region holds fewer entries than its cap; where the victim is packed, the victim's slot
    becomes a tombstone and the new entry is appended. The caller guarantees a plain page for slot lens[r].

    Args:
        packed: its side arrays and `dead` are written; codes never.

    Returns:
        As `ops.decode`: out (S, Hq, value_dim) in q's dtype, lse (S, Hq) float32, evicted (R,) int32.

    Raises:
        OptionError: shapes of the two parts that do not fit.
    """
    beside = table.shape[0], pages.key_dim
    if packed.known.get("fits") != beside:
        _check(packed, *beside)
        packed.known["fits"] = beside
    impl = _backend(pages.dtype, q.device)
    result: tuple[Tensor, Tensor, Tensor] = impl.decode(
        q, k_new, v_new, pages, table, lens, caps, recent, q_pos, rule, packed,
        scale=scale, softcap=softcap, window=window, sink_logits=sink_logits,
    )  # fmt: skip
    return result


def write(
    packed: PackedRegions,
    start: Tensor,
    count: Tensor,
    index: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scores: Tensor | None = None,
    log_masses: Tensor | None = None,
) -> None:
    """Encode chosen rows: row index[r, i] of region r goes to its packed slot start[r] + i, for i < count[r].

    Args:
        packed: its pages are written; `lens` and `dead` are neither read nor written.
        start, count: (R,) int32, multiples of `layout.grain`: a group is written once, as a whole.
        index: (R, width) int32.
        keys: (R, N, head_dim): all channels, as the model made them. values: (R, N, value_dim).
        positions: (R, N) int32. scores, log_masses: (R, N) float32, zero if None.

    Raises:
        OptionError: a start or a count that would cut a group; log masses for pages that have none.
        NumericsError: NaN, infinity, or a number beyond what the format's scales can hold. What `start` and `count`
            name may be half written; nothing else is touched.
    """
    grain = packed.pages.layout.grain
    if grain > 1:
        for name, given in (("start", start), ("count", count)):
            bad = given[given % grain != 0]
            if len(bad):
                raise OptionError(
                    f"{name}={int(bad[0])} would cut a group: this layout is written in runs of {grain} slots"
                )
    if log_masses is not None and not packed.pages.masses:
        raise OptionError("log_masses were given for packed pages that keep no masses; make the pool with masses=True")
    _check(packed, len(start), None)
    dtype = keys.dtype if keys.dtype in NATIVE_DTYPES else torch.float32
    _backend(dtype, packed.table.device).write(packed, start, count, index, keys, values, positions, scores, log_masses)


def read(packed: PackedRegions, width: int, head_dim: int) -> PaddedEntries:
    """The entries of every region as numbers, padded to `width` >= max(lens), tombstones at position -1.

    Keys (R, width, head_dim) and values (R, width, value_dim) are float32; channels that were dropped are zero.
    """
    return PaddedEntries(*_backend(torch.float32, packed.table.device).read(packed, width, head_dim))


def _check(packed: PackedRegions, n_regions: int, key_dim: int | None) -> None:
    layout: PackedLayout = packed.pages.layout
    if packed.table.shape[0] != n_regions:
        raise OptionError(f"{packed.table.shape[0]} packed regions beside {n_regions} plain ones")
    if packed.channels is None and key_dim is not None and layout.key_dim != key_dim:
        raise OptionError(
            f"packed keys of {layout.key_dim} channels beside plain ones of {key_dim}; name the kept ones in `channels`"
        )
    if packed.rope is not None and not (layout.key.fixed and packed.channels is None and packed.balance is None):
        raise OptionError("keys are stored before RoPE with calibrated scales only, in all channels and unbalanced")
    for given in (packed.key_scales, packed.key_zeros):
        if layout.key.fixed != (given is not None):
            need = "needs" if layout.key.fixed else "takes no"
            raise OptionError(f"this layout {need} calibrated key_scales and key_zeros in PackedRegions")
