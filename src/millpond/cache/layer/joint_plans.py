"""Plans of all layers at the end of one prompt, in a few launches: one choice, one move, and codes of many layers.

Layers are planned together if their plans only choose by scores among all tokens of the prompt, or keep all and only
quantize them, and their pages are of one pool. What stays moves inside the pages of a layer, or to pages of its own
where others hold them too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.entries.oldest import split_columns
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.layer.prompt_pages import let_go
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.publishing import publish_together
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.planning.prompt_selection import Ints, Selection, Wanted, select
from millpond.errors import PoolFullError
from millpond.kernels import ops
from millpond.kernels.args import EntryRows, PageRegions
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.selection_args import MoveArgs
from millpond.kernels.transfers import on_device, send
from millpond.kernels.window_args import PagedWindowArgs
from millpond.policy.eviction_plan import Counts
from millpond.policy.policy import REDUCE

#: Bytes of keys and values of a prompt that are read together to be encoded.
ENCODED_TOGETHER = 1 << 27


class JointPlan:
    """Plans of some layers of one prompt.

    Args:
        layers: The layers with what their plans ask, two or more, of one `kind`.
    """

    def __init__(self, layers: Sequence[tuple[LayerCache, Wanted]]) -> None:
        self._layers = [layer_cache for layer_cache, _ in layers]
        self._wanted = [wanted for _, wanted in layers]
        self._policy = self._layers[0].policy
        self._tables = [table for one in self._layers if (table := one.table) is not None]
        self._stores = [table.quantized for table in self._tables if isinstance(table.quantized, QuantizedStore)]
        self._n, self._n_heads = int(self._tables[0].lengths().max()), self._tables[0].n_kv_heads
        self._source = self._regions_of(self._tables, self._n)

    @staticmethod
    def kind(layer_cache: LayerCache, table: PageTable) -> Hashable:
        """Return what layers have in common that are planned together."""
        shape, held, others = layer_cache.attention.shape, int(table.lengths().max()), table.page_lists.n_shared() > 0
        codes = table.quantized
        of_codes = (id(codes.pool), codes.codec) if isinstance(codes, QuantizedStore) else None
        of_layer = id(layer_cache.policy), shape.scale, shape.softcap
        return of_layer, of_codes, id(table.pool), table.n_kv_heads, held, others

    def run(self) -> bool:
        """Run the plans.

        Returns:
            False if there is no room for them at once; nothing was changed.

        Raises:
            BudgetError: what must be protected does not fit.
            NumericsError: scores are NaN, or numbers that the format cannot hold.
        """
        signal = self._signal()
        selection = self._selection(signal)
        if selection is not None and selection.check.is_ready:
            selection.check.settle()
        columns, counts = self._everything() if selection is None else (selection.columns, selection.counts.ravel())
        none = columns[:, :0], np.zeros_like(counts)
        (codes, n_codes), (plain, n_plain) = none, (columns, counts)
        if self._stores:
            (codes, plain), (n_codes, n_plain) = split_columns(self._stores[0], columns, counts)
        with publish_together():
            targets = [layer_cache.room() for layer_cache in self._layers]
            try:
                done = self._reserve(targets, n_plain, n_codes)
                if done:
                    self._encode(targets[0].pool.arrays.dtype, codes, n_codes, signal)
                    self._move(targets, plain, n_plain, signal)
                    self._end(targets, n_plain, None if selection is None else selection.capacities)
                else:
                    self._let_go(targets)
            except BaseException:
                self._let_go(targets)
                raise
        if selection is not None:
            selection.check.settle()
        return done

    # ------------------------------------------------------------------ what stays

    def _selection(self, signal: Tensor | None) -> Selection | None:
        """Return the entries that stay; None if all do."""
        if self._policy.keeps_all:
            return None
        view = self._layers[0].planner.joint_view(len(self._source.lens), signal, self._source.device)
        return select(self._policy, view, self._wanted)

    def _everything(self) -> tuple[Tensor, Ints]:
        """Return the columns of all entries (L * H, N), and how many they are."""
        n_regions = len(self._tables) * self._n_heads
        column = torch.arange(self._n, dtype=torch.int32, device=self._source.device)
        return column.expand(n_regions, -1), np.full(n_regions, self._n, dtype=np.int32)

    def _signal(self) -> Tensor | None:
        """Return the signal of the scores, (L * H, N) float32; None if they need none."""
        policy = self._policy
        if policy.observes_all:
            return ops.read_scores(self._source, self._n)
        if not policy.window:
            return None
        last = [layer_cache.sequence_state.queries.last(0) for layer_cache in self._layers]
        q = torch.cat([queries for queries, _ in last])
        q = q.view(len(self._source.lens), -1, *q.shape[1:])
        shape, reduce = self._layers[0].attention.shape, REDUCE[policy.reduce]
        return ops.window_sums(PagedWindowArgs(q, last[0][1], self._source, self._n, shape, reduce))

    # ------------------------------------------------------------------ where it goes

    def _of_layers(self, counts: Ints) -> Ints:
        return counts.reshape(len(self._tables), self._n_heads)

    def _let_go(self, targets: Sequence[PageTable]) -> None:
        """Release what was reserved: layers whose plan has not ended hold what they held."""
        for layer_cache, into in zip(self._layers, targets, strict=False):
            if layer_cache.table is not into:
                let_go(into)
        for table in self._tables:
            if table.quantized is not None:  # else another table has it
                table.quantized.forget(0)

    def _reserve(self, targets: Sequence[PageTable], n_plain: Ints, n_codes: Ints) -> bool:
        """Reserve the pages of plain entries and of codes, (L * H,) of both.

        False if there is no room for all at once; layer by layer each gives back what it held before the next one needs
        room.
        """
        fresh = [into for table, into in zip(self._tables, targets, strict=True) if into is not table]
        if fresh and not fresh[0].pool.can_allocate(int((-(-n_plain // fresh[0].pool.slots)).sum())):
            return False
        try:
            for into, own in zip(fresh, self._of_layers(n_plain), strict=False):
                into.reserve(0, own)
            for store, own in zip(self._stores, self._of_layers(n_codes), strict=False):
                store.begin(own)
        except PoolFullError:
            return False
        return True

    def _end(self, targets: Sequence[PageTable], n_plain: Ints, capacities: Counts | None) -> None:
        """Let the layers hold what was written.

        capacities: (L, H) from now on; None for none.
        """
        for number, (layer_cache, into) in enumerate(zip(self._layers, targets, strict=True)):
            into.set_lengths(0, self._of_layers(n_plain)[number])
            layer_cache.end_joint_plan(into, self._wanted[number], None if capacities is None else capacities[number])

    def _encode(self, dtype: torch.dtype, columns: Tensor, counts: Ints, scores: Tensor | None) -> None:
        """Quantize entries as plain pages of `dtype` would hold them.

        Raises:
            NumericsError: numbers that the format cannot hold; no entry was changed.
        """
        width, heads = columns.shape[1], self._n_heads
        if not width:
            return
        first = self._stores[0]
        pages, table, lens = self._source.parts
        layer_bytes = heads * self._n * (pages.key_dim + pages.value_dim) * pages.dtype.itemsize
        together = max(ENCODED_TOGETHER // layer_bytes, 1) * heads
        arrays, index = first.pool.arrays, columns.int().contiguous()
        ids = np.concatenate([_padded(store.page_lists.ids, -(-width // first.slots)) for store in self._stores])
        zeros = np.zeros_like(counts)
        there, start, count = send([ids, zeros, counts], arrays.device)
        for begin in range(0, len(lens), together):
            rows = slice(begin, begin + together)
            read = ops.read(PageRegions(pages, table[rows], lens[rows]), self._n)
            own = None if scores is None else scores[rows]
            entries = read._replace(keys=read.keys.to(dtype), values=read.values.to(dtype))
            entries = entries if own is None else entries._replace(scores=own)
            regions = PackedRegions(arrays, there[rows], start[rows], start[rows], whole_value_dim=first.value_dim)
            on_host = zeros[rows], counts[rows]
            ops.write_packed(regions, EntryRows(start[rows], count[rows], index[rows], *entries, on_host=on_host))

    def _move(self, targets: Sequence[PageTable], columns: Tensor, counts: Ints, scores: Tensor | None) -> None:
        """Move plain entries, with the signals that they were chosen by as their scores."""
        same = targets[0] is self._tables[0]
        into = self._source if same else self._regions_of(targets, int(counts.max()))
        ops.move_entries(MoveArgs(self._source, into, columns.int(), on_device(counts, self._source.device), scores))

    @staticmethod
    def _regions_of(tables: Sequence[PageTable], n: int) -> PageRegions:
        """Return the plain pages of all regions of tables of one pool, of `n` entries each."""
        arrays, n_pages = tables[0].pool.arrays, -(-n // tables[0].pool.slots)
        ids = np.concatenate([_padded(table.page_lists.ids, n_pages) for table in tables])
        lens: npt.NDArray[np.int32] = np.full(len(ids), n, dtype=np.int32)
        return PageRegions(arrays, *send([ids, lens], arrays.device))


def _padded(ids: npt.NDArray[np.int32], n: int) -> npt.NDArray[np.int32]:
    """Return the first `n` columns of page ids (R, m), with any after those that there are."""
    wide = np.zeros((len(ids), n), dtype=np.int32)
    wide[:, : ids.shape[1]] = ids[:, :n]
    return wide


def run_plans(layer_caches: Iterable[LayerCache]) -> list[LayerCache]:
    """Run the plans that wait for the end of the prompt, of layers that go together.

    Returns:
        The other layers, in order.

    Raises:
        BudgetError, NumericsError: see `JointPlan.run`.
    """
    alone: list[LayerCache] = []
    kinds: dict[Hashable, list[tuple[LayerCache, Wanted]]] = {}
    for layer_cache in layer_caches:
        wanted, table = layer_cache.wanted(), layer_cache.table
        if wanted is None or table is None:
            alone.append(layer_cache)
        else:
            kinds.setdefault(JointPlan.kind(layer_cache, table), []).append((layer_cache, wanted))
    for layers in kinds.values():
        if len(layers) < 2 or not JointPlan(layers).run():
            alone += [layer_cache for layer_cache, _ in layers]
    return sorted(alone, key=lambda layer_cache: layer_cache.index)
