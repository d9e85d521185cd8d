"""The quantized part of a table's regions in several tiers, through which entries pass as they grow old.

Each tier is a `QuantizedStore` with pages of its own. Slots are counted through all of them, the newest tier first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.pages.page_lists import Rows
from millpond.cache.pages.quantized_store import Ints, NewCodes, QuantizedStore
from millpond.codec.spec import Codec
from millpond.kernels.args import PaddedEntries, joined
from millpond.kernels.packed.regions import PackedRegions


class AgedStore:
    """The packed part of regions in the tiers of a codec by age.

    Attributes:
        codec: all tiers. parts: where the entries of each lie, in the order of `codec.ages`.
        basis: none: formats by age hold numbers as the model makes them.
        steps_until_check: 0: how many entries are due depends on how many a head holds, so each step asks.
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
        """The tiers that the decode kernel does not read itself: all but the last."""
        return self.parts[:-1]

    @property
    def live(self) -> Ints:
        """(n_seq, n_kv_heads) entries held."""
        found: Ints = np.sum([part.live for part in self.parts], axis=0, dtype=np.int32)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the tables themselves."""
        return sum(part.nbytes for part in self.parts)

    def kv_bytes(self) -> npt.NDArray[np.int64]:
        """(n_seq,) bytes of keys and values in the pages of each sequence."""
        found: npt.NDArray[np.int64] = np.sum([part.kv_bytes() for part in self.parts], axis=0)
        return found

    def rows(self, sequence: int) -> slice:
        """The regions of one sequence."""
        return self.parts[0].rows(sequence)

    def regions(self) -> PackedRegions:
        """What the decode kernel reads itself: the last tier of all regions."""
        return self.parts[-1].regions()

    def width(self, sequence: int) -> int:
        """Slots of the longest region of a sequence in each tier, together."""
        return sum(part.width(sequence) for part in self.parts)

    def read(self, sequence: int) -> PaddedEntries:
        """The entries of a sequence as numbers, float32, slot by slot; tombstones and padding at position -1."""
        return joined([part.read(sequence) for part in self.parts])

    def positions(self, rows: Rows) -> Tensor:
        """(n, width) int32: what lies in each slot of some regions, -1 for nothing."""
        return torch.cat([part.positions(rows) for part in self.parts], 1)

    def scores(self, rows: Rows) -> Tensor:
        """(n, width) float32: the accumulators of some regions."""
        return torch.cat([part.scores(rows) for part in self.parts], 1)

    # ------------------------------------------------------------------ writing

    def collect_statistics(self, sequence: int, q: Tensor, k: Tensor) -> None:
        """Nothing: no tier by age depends on a prompt."""

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
        """See `QuantizedStore.absorb`; what is quantized joins the newest tier, of which pages are `emptied`."""
        columns = [slice(0, 0)] * len(self.parts)
        if kept is not None:
            columns = [own for _, own in self._columns(self.rows(sequence))]
        olds = [(None if kept is None else kept[:, own], None if scores is None else scores[:, own]) for own in columns]
        first, *others = self.parts
        first.absorb(sequence, new, kept=olds[0][0], scores=olds[0][1], emptied=emptied, write_rest=write_rest)
        for part, (kept_own, scores_own) in zip(others, olds[1:], strict=True):
            part.absorb(sequence, kept=kept_own, scores=scores_own)

    def mark_evicted(self, rows: Rows, leave: Tensor) -> None:
        """Make tombstones of the entries in some slots, leave (n, width) bool, of some regions."""
        for part, own in self._columns(rows):
            part.mark_evicted(rows, leave[:, own])

    def rescore(self, rows: Rows, scores: Tensor, where: Tensor) -> None:
        """Give entries in some slots, where (n, width) bool, new accumulators, of the same shape."""
        for part, own in self._columns(rows):
            part.rescore(rows, scores[:, own], where[:, own])

    def forget(self, sequence: int) -> None:
        """Free all pages of a sequence."""
        for part in self.parts:
            part.forget(sequence)

    def stepped(self, buries: bool) -> None:
        """After a decoding step, which may have buried entries."""
        for part in self.parts:
            part.stepped(buries)

    # ------------------------------------------------------------------ sharing

    def select(self, sequences: list[int]) -> None:
        """Become the given sequences, in this order; one may be named many times: pages are shared."""
        for part in self.parts:
            part.select(sequences)

    def fork(self) -> AgedStore:
        """The same entries once more: pages are shared until one of the two writes."""
        return AgedStore(self.codec, [part.fork() for part in self.parts])

    def copy_on_write(self) -> None:
        """Before a write, and before a step that writes scores or tombstones: copy every shared page.

        Raises:
            PoolFullError: no room for the copies; what was copied holds the same.
        """
        for part in self.parts:
            part.copy_on_write()

    def clear(self) -> None:
        """Give every page back."""
        for part in self.parts:
            part.clear()

    # ------------------------------------------------------------------ internal

    def _columns(self, rows: Rows) -> Iterator[tuple[QuantizedStore, slice]]:
        """Each tier, and which of the columns of `positions` are its own."""
        begin = 0
        for part in self.parts:
            width = int(part.lens[rows].max(initial=0))
            yield part, slice(begin, begin + width)
            begin += width


#: What regions hold as codes.
QuantizedPart = QuantizedStore | AgedStore
