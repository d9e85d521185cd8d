"""Quantized part of a table's regions in several tiers, through which entries move by age.

Each tier is a `QuantizedStore` with pages of its own. Slots are counted through all of them, the newest tier first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.pages.page_lists import Rows
from millpond.cache.pages.quantized_regions import Ints
from millpond.cache.pages.quantized_store import NewCodes, QuantizedStore
from millpond.codec.spec import Codec
from millpond.kernels.args import PaddedEntries, joined
from millpond.kernels.packed.regions import PackedRegions


class AgedStore:
    """Quantized part of regions in the tiers of a codec by age.

    Args:
        codec: Codec with all tiers.
        parts: Store of each tier, in the order of `codec.ages`.

    Attributes:
        codec: Codec with all tiers.
        parts: Store of each tier, in the order of `codec.ages`.
        basis: None: formats by age hold numbers as the model computes them.
        steps_until_check: 0, so each step checks: how many entries are due depends on how many a head holds.
    """

    def __init__(self, codec: Codec, parts: Sequence[QuantizedStore]) -> None:
        self.codec, self.parts = codec, tuple(parts)
        self.basis = None
        self.steps_until_check = 0

    # ------------------------------------------------------------------ views

    @property
    def slots(self) -> int:
        """Entries of a page of the newest codes."""
        return self.parts[0].slots

    @property
    def middle(self) -> tuple[QuantizedStore, ...]:
        """Tiers that the decode kernel does not read itself: all but the last."""
        return self.parts[:-1]

    @property
    def live(self) -> Ints:
        """Entries that are held, (n_seq, n_kv_heads)."""
        live: Ints = np.sum([part.live for part in self.parts], axis=0, dtype=np.int32)
        return live

    @property
    def may_live(self) -> npt.NDArray[np.bool_]:
        """See `QuantizedRegions.may_live`."""
        holds: npt.NDArray[np.bool_] = np.any([part.may_live for part in self.parts], axis=0)
        return holds

    @property
    def nbytes(self) -> int:
        """Bytes of the tables themselves."""
        return sum(part.nbytes for part in self.parts)

    def kv_bytes(self) -> npt.NDArray[np.int64]:
        """Return the bytes of keys and values in the pages of each sequence, (n_seq,)."""
        kv_bytes: npt.NDArray[np.int64] = np.sum([part.kv_bytes() for part in self.parts], axis=0)
        return kv_bytes

    def rows(self, sequence: int) -> slice:
        """Return the regions of one sequence."""
        return self.parts[0].rows(sequence)

    def regions(self) -> PackedRegions:
        """Return the last tier of all regions, which the decode kernel reads itself."""
        return self.parts[-1].regions()

    def width(self, sequence: int) -> int:
        """Return the slots of the longest region of a sequence, summed over the tiers."""
        return sum(part.width(sequence) for part in self.parts)

    def read(self, sequence: int) -> PaddedEntries:
        """Return the entries of a sequence as float32 numbers, slot by slot.

        Tombstones and padding have position -1.
        """
        return joined([part.read(sequence) for part in self.parts])

    def positions(self, rows: Rows) -> Tensor:
        """Return the positions in the slots of some regions, (n, width) int32; -1 for no entry."""
        return torch.cat([part.positions(rows) for part in self.parts], 1)

    def scores(self, rows: Rows) -> Tensor:
        """Return the score accumulators of some regions, (n, width) float32."""
        return torch.cat([part.scores(rows) for part in self.parts], 1)

    # ------------------------------------------------------------------ writing

    def collect_statistics(
        self, sequence: int, q: Tensor, k: Tensor, outputs: Tensor | None = None, norms: Tensor | None = None
    ) -> None:
        """See `QuantizedStore.collect_statistics`; of all tiers MiKV's lower one needs it."""
        for part in self.parts:
            part.collect_statistics(sequence, q, k, outputs, norms)

    def absorb(
        self,
        sequence: int,
        new: NewCodes | None = None,
        *,
        kept: Tensor | None = None,
        scores: Tensor | None = None,
        emptied: npt.NDArray[np.bool_] | None = None,
        write_rest: Callable[[], None] | None = None,
    ) -> None:
        """See `QuantizedStore.absorb`; new codes join the newest tier, whose pages are `emptied`."""
        columns = [slice(0, 0)] * len(self.parts)
        if kept is not None or scores is not None:
            columns = [part_columns for _, part_columns in self._columns(self.rows(sequence))]
        olds = [
            (None if kept is None else kept[:, part_columns], None if scores is None else scores[:, part_columns])
            for part_columns in columns
        ]
        first, *others = self.parts
        first.absorb(sequence, new, kept=olds[0][0], scores=olds[0][1], emptied=emptied, write_rest=write_rest)
        for part, (kept_part, scores_part) in zip(others, olds[1:], strict=True):
            part.absorb(sequence, kept=kept_part, scores=scores_part)

    def mark_evicted(self, rows: Rows, leave: Tensor) -> None:
        """Make tombstones of entries of some regions, leave (n, width) bool by slot."""
        for part, columns in self._columns(rows):
            part.mark_evicted(rows, leave[:, columns])

    def rescore(self, rows: Rows, scores: Tensor, mask: Tensor) -> None:
        """Give entries of some regions, mask (n, width) bool by slot, new accumulators.

        `scores` has the shape of the mask.
        """
        for part, columns in self._columns(rows):
            part.rescore(rows, scores[:, columns], mask[:, columns])

    def forget(self, sequence: int) -> None:
        """Free all pages of a sequence."""
        for part in self.parts:
            part.forget(sequence)

    def stepped(self, buries: bool) -> None:
        """Update the counters after a decoding step that may have written tombstones (`buries`)."""
        for part in self.parts:
            part.stepped(buries)

    # ------------------------------------------------------------------ sharing

    def select(self, sequences: list[int]) -> None:
        """Keep the given sequences, in this order; the pages of one named many times are shared."""
        for part in self.parts:
            part.select(sequences)

    def fork(self) -> AgedStore:
        """Return a store of the same entries; pages are shared until one of the two writes."""
        return AgedStore(self.codec, [part.fork() for part in self.parts])

    def copy_on_write(self) -> None:
        """Copy every shared page, before a write or a step that writes scores or tombstones.

        Raises:
            PoolFullError: no room for the copies; what was copied holds the same.
        """
        for part in self.parts:
            part.copy_on_write()

    def clear(self) -> None:
        """Release every page."""
        for part in self.parts:
            part.clear()

    # ------------------------------------------------------------------ internal

    def _columns(self, rows: Rows) -> Iterator[tuple[QuantizedStore, slice]]:
        """Yield each tier and the slice of its columns in `positions`."""
        begin = 0
        for part in self.parts:
            width = int(part.lens[rows].max(initial=0))
            yield part, slice(begin, begin + width)
            begin += width


#: Quantized part of regions.
QuantizedPart = QuantizedStore | AgedStore
