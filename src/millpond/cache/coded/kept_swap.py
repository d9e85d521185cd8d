"""Sequences of which entries were evicted, outside of the pool in codes: what is kept stays in its slots."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.cache.coded.kept_coder import KeptCoder, KeptCodes, KeptFacts
from millpond.cache.coded.swapped_codes import SwappedCodes
from millpond.cache.pages.page_table import PageTable
from millpond.kernels import ops
from millpond.kernels.args import EntryRows

#: What each layer of a sequence holds, by name, see `KeptCoder`.
Layers = list[dict[str, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class KeptSwapCoding:
    """How the sequences of one batch cache are coded while they are outside of the pool.

    Attributes:
        coder: Coder of the model.
        thread: Where it codes and decodes.
        sequences: Of each sequence.
    """

    coder: KeptCoder
    thread: ThreadPoolExecutor
    sequences: Sequence[KeptFacts]

    def of(self, tables: Sequence[PageTable]) -> KeptSequences | None:
        """Return the sequences of tables, one per layer; they stay there.

        None: they have no codes.
        """
        sequences: list[Layers] = [[] for _ in self.sequences]
        for table in tables:
            if table.quantized is not None:
                return None
            for number, layers in enumerate(sequences):
                layer = _read(table, number)
                if layer is None:
                    return None
                layers.append(layer)
        return KeptSequences(self, sequences, tables[0].pool.arrays.dtype, tables[0].pool.arrays.device)


class KeptSequences(SwappedCodes[Layers, tuple[Layers, KeptCodes]]):
    """Sequences of a batch cache as codes.

    Args:
        coding: How they are coded.
        entries: For each sequence its layers, on the host; they are freed once they are coded.
        dtype: Type of the numbers in pages.
        device: Device of the pages.
    """

    def __init__(self, coding: KeptSwapCoding, entries: list[Layers], dtype: torch.dtype, device: torch.device) -> None:
        self._coding, self._dtype, self._device = coding, dtype, device
        self._entries: list[Layers] | None = entries
        super().__init__(coding.thread)

    @property
    def nbytes(self) -> int:
        coded = self._coded.done() and not self._coded.exception()
        held = self._coded.result() if coded else self._entries or []
        return sum(tensor.nbytes for layers in held for layer in layers for tensor in layer.values())

    def write(self, tables: Sequence[PageTable]) -> Sequence[KeptCodes]:
        """Write what was decoded to the pages that the tables hold again, see `SwappedCodes`.

        Pages that several sequences share hold what the last of them decoded.
        """
        found = self.decoded()
        for number, (layers, _) in enumerate(found):
            for table, layer in zip(tables, layers, strict=True):
                _write(table, number, layer)
        return [codes for _, codes in found]

    def _code(self) -> list[Layers]:
        assert self._entries is not None, "entries wait to be coded"
        facts, coder = self._coding.sequences, self._coding.coder
        coded = [coder.code(layers, own) for own, layers in zip(facts, self._entries, strict=True)]
        self._entries = None
        return coded

    def _decode(self) -> list[tuple[Layers, KeptCodes]]:
        coder = self._coding.coder
        return [
            coder.decode(layers, own.ids, self._dtype, self._device)
            for own, layers in zip(self._coding.sequences, self._coded.result(), strict=True)
        ]


def _read(table: PageTable, sequence: int) -> dict[str, Tensor] | None:
    """Return what a layer holds of a sequence; None: entries with masses, or none at all."""
    lens = torch.from_numpy(table.lengths()[sequence].copy()).int()
    width = int(lens.max())
    entries = ops.read(table.regions_of(table.rows(sequence)), width)
    if not width or (entries.log_masses is not None and bool(entries.log_masses.any())):
        return None
    numbers = {name: getattr(entries, name).cpu() for name in ("keys", "values", "positions", "scores")}
    return {**numbers, "lens": lens}


def _write(table: PageTable, sequence: int, layer: dict[str, Tensor]) -> None:
    """Write decoded entries to the slots that they came from."""
    keys, values, device = layer["keys"], layer["values"], layer["keys"].device
    lens, positions, scores = (layer[name].to(device) for name in ("lens", "positions", "scores"))
    index = torch.arange(keys.shape[1], dtype=torch.int32, device=device).expand(len(keys), -1).contiguous()
    rows = EntryRows(torch.zeros_like(lens), lens, index, keys, values, positions, scores)
    ops.write(table.regions_of(table.rows(sequence)), rows)
