"""Sequences outside of the pool in codes: their pages are free at once, and coding and decoding run in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millpond.cache.coded.coder import TextCoder
from millpond.cache.coded.fill import layer_entries
from millpond.cache.coded.swapped_codes import SwappedCodes
from millpond.cache.coded.text import CodedText, LayerEntries
from millpond.cache.entries.read_write import in_order
from millpond.cache.pages.page_table import PageTable
from millpond.cache.types import Entries
from millpond.kernels import ops
from millpond.kernels.args import EntryRows


@dataclass(frozen=True, slots=True, eq=False)
class SequenceFacts:
    """Facts that the codes of a sequence follow from, besides its entries.

    Attributes:
        ids: Tokens that it has read, (n,).
        exact: For each layer positions that stay as they are, int64.
        codes: Codes that it was decoded from; None: it was not.
    """

    ids: np.ndarray
    exact: Sequence[Tensor]
    codes: CodedText | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SwapCoding:
    """How the sequences of one batch cache are coded while they are outside of the pool.

    Attributes:
        coder: Coder of the model.
        thread: Where it codes and decodes.
        sequences: Of each sequence.
    """

    coder: TextCoder
    thread: ThreadPoolExecutor
    sequences: Sequence[SequenceFacts]

    def of(self, tables: Sequence[PageTable]) -> CodedSequences | None:
        """Return the sequences of tables, see `CodedSequences.of`."""
        return CodedSequences.of(tables, self)


@dataclass(frozen=True, slots=True)
class _Slots:
    """Entries of a sequence in the slots of a layer.

    Attributes:
        positions: (n,) int64, the same in all heads.
        dtype: Type of the numbers in its pages.
        device: Where these are.
    """

    positions: Tensor
    dtype: torch.dtype
    device: torch.device


class CodedSequences(SwappedCodes[CodedText, list[LayerEntries]]):
    """Sequences of a batch cache as codes.

    Args:
        coding: How they are coded.
        slots: For each sequence the slots of its layers.
        entries: For each sequence its layers, on the host, by position; they are freed once they are coded.
    """

    def __init__(self, coding: SwapCoding, slots: list[list[_Slots]], entries: list[list[LayerEntries]]) -> None:
        self._coding, self._slots = coding, slots
        self._entries: list[list[LayerEntries]] | None = entries
        super().__init__(coding.thread)

    @classmethod
    def of(cls, tables: Sequence[PageTable], coding: SwapCoding) -> CodedSequences | None:
        """Return the sequences of tables, one per layer, which stay there.

        None: entries that have no codes, such as others in each head, some of which were dropped, or with scores.
        """
        n_seq = len(coding.sequences)
        slots: list[list[_Slots]] = [[] for _ in range(n_seq)]
        entries: list[list[LayerEntries]] = [[] for _ in range(n_seq)]
        for table in tables:
            if table.quantized is not None:
                return None
            for sequence in range(n_seq):
                found = _read(table, sequence, len(coding.sequences[sequence].ids))
                if found is None:
                    return None
                slots[sequence].append(found[0])
                entries[sequence].append(found[1])
        return cls(coding, slots, entries)

    @property
    def nbytes(self) -> int:
        if self._coded.done() and not self._coded.exception():
            return sum(text.nbytes for text in self._coded.result())
        entries = self._entries or []
        return sum(layer.keys.nbytes + layer.values.nbytes for layers in entries for layer in layers)

    def write(self, tables: Sequence[PageTable]) -> list[CodedText]:
        """Write what was decoded to the pages that the tables hold again, see `SwappedCodes`."""
        for sequence, layers in enumerate(self.decoded()):
            for table, slots, layer in zip(tables, self._slots[sequence], layers, strict=True):
                _write(table, sequence, slots, layer)
        return self._coded.result()

    def _code(self) -> list[CodedText]:
        assert self._entries is not None, "entries wait to be coded"
        facts, coder = self._coding.sequences, self._coding.coder
        shared = None
        if len(facts) > 1 and facts[0].codes is None:  # they begin alike, with one prompt
            n = min(_alike(facts[0].ids, own.ids) for own in facts)
            cut = [layer.until(n) for layer in self._entries[0]]
            if all(layer.first < n for layer in cut):
                shared = coder.code(cut, facts[0].exact, facts[0].ids, None)
        texts = [
            coder.code(layers, own.exact, own.ids, own.codes or shared)
            for own, layers in zip(facts, self._entries, strict=True)
        ]
        self._entries = None
        return texts

    def _decode(self) -> list[list[LayerEntries]]:
        decoded = []
        for text, slots in zip(self._coded.result(), self._slots, strict=True):
            first = slots[0]
            decoded.append(list(self._coding.coder.decode(text, first.dtype, first.device)))
        return decoded


def _read(table: PageTable, sequence: int, end: int) -> tuple[_Slots, LayerEntries] | None:
    """Return the entries of a sequence that has read `end` tokens; None: they have no codes."""
    lens = table.lengths()[sequence]
    n = int(lens.max(initial=0))
    if not n or bool((lens != n).any()):
        return None
    entries = Entries(*ops.read(table.regions_of(table.rows(sequence)), n))
    positions = entries.positions.cpu().long()
    layer = layer_entries(in_order(entries), end)
    if layer is None or bool((positions != positions[0]).any()):
        return None
    arrays = table.pool.arrays
    return _Slots(positions[0], arrays.dtype, arrays.device), layer


def _write(table: PageTable, sequence: int, slots: _Slots, layer: LayerEntries) -> None:
    """Write decoded entries to the slots that they came from."""
    regions = table.regions_of(table.rows(sequence))
    heads, n = table.n_kv_heads, len(slots.positions)
    index = (slots.positions - layer.first).int().expand(heads, -1).contiguous().to(slots.device)
    positions = torch.arange(layer.first, layer.end, dtype=torch.int32, device=slots.device).expand(heads, -1)
    start, count = (torch.full((heads,), number, dtype=torch.int32, device=slots.device) for number in (0, n))
    ops.write(regions, EntryRows(start, count, index, layer.keys, layer.values, positions))


def _alike(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many tokens two texts have in common at their beginning."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n
