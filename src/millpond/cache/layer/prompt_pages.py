"""Pages of a prompt's entries until its plan, in the dtype in which the model computes.

Tokens of one pass attend to each other as the model made them. If pages hold fewer bits, tokens of two passes would
not, and the place at which a prompt is cut would change the result. So a prompt that is planned at its end is stored in
pages of the model's own dtype until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from millpond.cache.entries.quantize import write_fresh_pages
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool
from millpond.cache.types import Entries
from millpond.kernels import ops
from millpond.kernels.args import EntryRows

#: find(key_dim, value_dim, dtype that the model computes in, device) -> the pool of pages of this shape.
FindPool = Callable[[int, int, torch.dtype, torch.device], PagePool]
#: plan(table, sequence): let the table hold what shall stay of the entries of a sequence.
Plan = Callable[[PageTable, int], None]


class PromptPages:
    """The pools of one layer, and the moves of tables between them.

    Args:
        stored: Function that returns the pool of entries that were planned.
        apart: Function that returns the pool of entries that wait for a plan; None for the same.
        waits: Function that says whether a prompt that begins or continues now is planned after its pass.
    """

    def __init__(self, stored: FindPool, apart: FindPool | None, waits: Callable[[], bool]) -> None:
        self._stored = stored
        self._apart = apart or stored
        self._waits = waits

    @property
    def _reading(self) -> FindPool:
        return self._apart if self._waits() else self._stored

    def pool(self, k: Tensor, v: Tensor, *, planned: bool) -> PagePool:
        """Return the pool of new entries (..., key_dim) and (..., value_dim)."""
        find = self._stored if planned else self._reading
        return find(k.shape[-1], v.shape[-1], k.dtype, k.device)

    def begin(self, table: PageTable, dtype: torch.dtype) -> PageTable:
        """Return the table for more tokens of a prompt: another one if the pages hold fewer bits.

        Args:
            table: Table of the layer.
            dtype: Type in which the model computes.

        Raises:
            PoolFullError: no room; nothing was changed.
        """
        arrays = table.pool.arrays
        pool = self._reading(arrays.key_dim, arrays.value_dim, dtype, arrays.device)
        if table.unplanned or pool is table.pool:
            return table
        into, lens = table.emptied(pool), table.lengths()
        width = int(lens.max(initial=0))
        entries = ops.read(table.regions, width)
        index = torch.arange(width, dtype=torch.int32, device=arrays.device).expand(table.n_regions, -1).contiguous()
        try:
            for sequence in range(table.n_seq):
                into.reserve(sequence, lens[sequence])
        except BaseException:
            let_go(into)
            raise
        ops.write(into.regions, EntryRows(torch.zeros_like(table.lens), table.lens.clone(), index, *entries))
        for sequence in range(table.n_seq):
            into.set_lengths(sequence, lens[sequence])
        let_go(table)
        return into

    def room(self, table: PageTable) -> PageTable | None:
        """Return an empty table for what a plan keeps of all sequences of a table.

        None: its own pages are written, which nobody else holds.
        """
        arrays = table.pool.arrays
        if table.unplanned:
            return table.emptied(self._stored(arrays.key_dim, arrays.value_dim, arrays.dtype, arrays.device))
        return table.emptied(table.pool) if table.page_lists.n_shared() else None

    def end(self, table: PageTable, sequences: Sequence[int], plan: Plan) -> PageTable:
        """Return the table after the plans of `sequences`: another one if it had own pages.

        In that case every sequence is planned, since all move.

        Raises:
            PoolFullError: no room; what was not planned stays as it was.
        """
        into, planned = table, []
        if table.unplanned:
            arrays = table.pool.arrays
            into = table.emptied(self._stored(arrays.key_dim, arrays.value_dim, arrays.dtype, arrays.device))
            sequences = range(table.n_seq)
        try:
            for sequence in sequences:
                plan(into, sequence)
                planned.append(sequence)
        except BaseException:
            if into is not table:
                for sequence in planned:  # less than it held, so there is room
                    _copy(into, table, sequence)
                let_go(into)
            raise
        if into is not table:
            let_go(table)
        return into


def _copy(source: PageTable, target: PageTable, sequence: int) -> None:
    """Let a sequence hold in `target` the plain entries that it holds in `source`."""
    rows, lens = source.rows(sequence), source.lengths()[sequence]
    width = int(lens.max(initial=0))
    entries = Entries(*ops.read(source.regions_of(rows), width))
    index = torch.arange(width, device=source.lens.device).expand(len(lens), -1)
    write_fresh_pages(target, sequence, entries, index, lens)


def let_go(table: PageTable) -> None:
    """Release the plain pages of a table whose quantized part another one takes over."""
    table.quantized = None
    table.clear()
