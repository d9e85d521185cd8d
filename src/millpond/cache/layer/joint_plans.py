"""Plans of all layers at the end of one prompt, in a few launches: one choice, and one move of what stays.

Layers are planned together if their plans only choose by scores among all tokens of the prompt, and their pages are of
one pool. What stays moves inside the pages of a layer, or to pages of its own where others hold them too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.layer.prompt_pages import let_go
from millpond.cache.pages.page_table import PageTable, publish_together
from millpond.cache.planning.prompt_selection import Ints, Selection, Wanted, select
from millpond.errors import PoolFullError
from millpond.kernels import ops
from millpond.kernels.args import PageRegions
from millpond.kernels.selection_args import MoveArgs
from millpond.kernels.transfers import on_device, send
from millpond.kernels.window_args import PagedWindowArgs
from millpond.policy.policy import REDUCE


class JointPlan:
    """Plans of some layers of one prompt.

    Args:
        layers: The layers with what their plans ask, two or more, of one `kind`.
    """

    def __init__(self, layers: Sequence[tuple[LayerCache, Wanted]]) -> None:
        self._layers = [layer_cache for layer_cache, _ in layers]
        self._wanted = [wanted for _, wanted in layers]
        self._tables = [table for one in self._layers if (table := one.table) is not None]
        self._n = int(self._tables[0].lengths().max())
        self._source = self._regions_of(self._tables, self._n)

    @staticmethod
    def kind(layer_cache: LayerCache, table: PageTable) -> Hashable:
        """Return what layers have in common that are planned together."""
        shape, held, others = layer_cache.attention.shape, int(table.lengths().max()), table.page_lists.n_shared() > 0
        return id(layer_cache.policy), id(table.pool), table.n_kv_heads, held, others, shape.scale, shape.softcap

    def run(self) -> bool:
        """Run the plans.

        Returns:
            False if there is no room for them at once; nothing was changed.

        Raises:
            BudgetError: what must be protected does not fit.
            NumericsError: scores are NaN.
        """
        first = self._layers[0]
        signal = self._signal()
        view = first.planner.joint_view(len(self._source.lens), signal, self._source.device)
        selection = select(first.policy, view, self._wanted)
        if selection.check.is_ready:
            selection.check.settle()
        with publish_together():
            targets = self._targets(selection.counts)
            if targets is None:
                return False
            self._move(targets, selection, signal)
            for layer_cache, into, wanted, counts, capacities in zip(
                self._layers, targets, self._wanted, selection.counts, selection.capacities, strict=True
            ):
                into.set_lengths(0, counts)
                layer_cache.end_joint_plan(into, wanted, capacities)
        selection.check.settle()
        return True

    def _signal(self) -> Tensor | None:
        """Return the signal of the scores, (L * H, N) float32; None if they need none."""
        first = self._layers[0]
        policy = first.policy
        if policy.observes_all:
            return ops.read_scores(self._source, self._n)
        if not policy.window:
            return None
        last = [layer_cache.sequence_state.queries.last(0) for layer_cache in self._layers]
        q = torch.cat([queries for queries, _ in last])
        q = q.view(len(self._source.lens), -1, *q.shape[1:])
        return ops.window_sums(
            PagedWindowArgs(q, last[0][1], self._source, self._n, first.attention.shape, REDUCE[policy.reduce])
        )

    def _targets(self, counts: Ints) -> list[PageTable] | None:
        """Return the tables for what stays, counts (L, H), with their pages; None if there is no room."""
        rooms = [layer_cache.room() for layer_cache in self._layers]
        fresh = [(into, own) for table, into, own in zip(self._tables, rooms, counts, strict=True) if into is not table]
        need = sum(int((-(-own // into.pool.slots)).sum()) for into, own in fresh)
        try:
            if fresh and not fresh[0][0].pool.can_allocate(need):
                raise PoolFullError(f"{need} pages for all layers together")
            for into, own in fresh:
                into.reserve(0, own)
        except PoolFullError:  # layer by layer each gives back what it held before the next one needs room
            for into, _ in fresh:
                let_go(into)
            return None
        return rooms

    def _move(self, targets: Sequence[PageTable], selection: Selection, scores: Tensor | None) -> None:
        """Move what stays, with the signals that it was chosen by as its scores."""
        counts = on_device(selection.counts.ravel(), self._source.device)
        same = targets[0] is self._tables[0]
        into = self._source if same else self._regions_of(targets, int(selection.counts.max()))
        ops.move_entries(MoveArgs(self._source, into, selection.columns, counts, scores))

    @staticmethod
    def _regions_of(tables: Sequence[PageTable], n: int) -> PageRegions:
        """Return the plain pages of all regions of tables of one pool, of `n` entries each."""
        arrays = tables[0].pool.arrays
        n_pages = -(-n // tables[0].pool.slots)
        ids = np.zeros((len(tables), tables[0].n_regions, n_pages), dtype=np.int32)
        for own, table in zip(ids, tables, strict=True):
            held = table.page_lists.ids[:, :n_pages]
            own[:, : held.shape[1]] = held
        lens: npt.NDArray[np.int32] = np.full(len(tables) * tables[0].n_regions, n, dtype=np.int32)
        return PageRegions(arrays, *send([ids.reshape(-1, n_pages), lens], arrays.device))


def run_plans(layer_caches: Iterable[LayerCache]) -> list[LayerCache]:
    """Run the plans that wait for the end of the prompt in layers that can be planned together.

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
