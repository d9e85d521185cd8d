"""Snapshots of a request's entries in a layer, taken while it runs and once more when it ends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from millpond.cache.batch_cache import BatchCache
from millpond.cache.entries.read_write import gather
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.page_table import PageTable
from millpond.engine.decode_group import figures_of
from millpond.engine.outputs import CacheSnapshot, KVStats
from millpond.engine.request_state import RequestState
from millpond.errors import OptionError
from millpond.runner.packed_model import LayerShape

#: Watched requests that have ended and whose snapshots are still kept.
_KEPT_REQUESTS = 8


def look(batch_cache: BatchCache, sequence: int, layer: int, ids: Sequence[int], kv: KVStats) -> CacheSnapshot:
    """Return the entries that `layer` holds of one sequence whose text is `ids`.

    Tokens that the cache has not seen yet are left out.

    Raises:
        OptionError: there is no such layer.
    """
    if not 0 <= layer < len(batch_cache.layers):
        raise OptionError(f"layer {layer}: the model has layers 0 to {len(batch_cache.layers) - 1}")
    seen = int(batch_cache.tracker.seen[sequence] + batch_cache.tracker.closed[sequence])
    layer_cache = batch_cache.layers[layer]
    table = layer_cache.table
    n_heads = 0 if table is None else table.n_kv_heads
    holders, sums = torch.zeros(seen), torch.zeros(seen)
    if table is not None:
        for positions, scores in _marks(layer_cache, sequence):
            is_entry = (positions >= 0) & (positions < seen)
            token_indices = positions[is_entry].long()
            holders.index_add_(0, token_indices, torch.ones(len(token_indices)))
            sums.index_add_(0, token_indices, scores[is_entry])
    means = (sums / holders).tolist()
    counts = holders.tolist()
    return CacheSnapshot(
        layer,
        len(batch_cache.layers),
        n_heads,
        tuple(ids[:seen]),
        tuple(count / max(n_heads, 1) for count in counts),
        tuple(mean if count else None for mean, count in zip(means, counts, strict=True)),
        kv,
    )


def held_positions(layer_cache: LayerCache, sequence: int) -> list[Tensor]:
    """Return positions in the text of the entries of one sequence, (H, T) each, on the host.

    -1 where there is no entry. Entries that are stored unquantized come first, then codes.
    """
    table = layer_cache.table
    if table is None:
        return []
    if not table.page_lists.pool.arrays.n_arenas and table.quantized is None:
        return []
    return [positions for positions, _ in _marks(layer_cache, sequence)]


def _marks(layer_cache: LayerCache, sequence: int) -> list[tuple[Tensor, Tensor]]:
    """Return positions in the text (H, T) and scores (H, T) of the entries of one sequence.

    They are on the host; positions are -1 where there is no entry. Keys and values stay where they are. Entries that
    are stored unquantized come first, then codes.
    """
    table = layer_cache.table
    assert table is not None, "a layer that holds something"
    marks = [_plain_marks(table, sequence)] if table.page_lists.pool.arrays.n_arenas else []
    if (quantized := table.quantized) is not None:
        rows = quantized.rows(sequence)
        marks.append((quantized.positions(rows).cpu(), quantized.scores(rows).cpu()))
    if layer_cache.tracker.closed[sequence]:
        marks = [(layer_cache.text_positions(sequence, positions), scores) for positions, scores in marks]
    return marks


def _plain_marks(table: PageTable, sequence: int) -> tuple[Tensor, Tensor]:
    """Return positions and scores of the entries that are stored unquantized."""
    rows, arrays = table.rows(sequence), table.page_lists.pool.arrays
    pages, lens = table.pages[rows], table.lens[rows].cpu()  # (H, n), (H,)
    positions = gather(arrays, pages, arrays.positions).cpu()
    empty = torch.arange(positions.shape[1]) >= lens[:, None]
    return positions.masked_fill(empty, -1), gather(arrays, pages, arrays.scores).cpu()


class SnapshotStore:
    """Snapshots of running requests, and those of the last watched ones at their end.

    Args:
        layers: Shapes of the model's layers.
    """

    def __init__(self, layers: list[LayerShape]) -> None:
        self._shapes = layers
        self._snapshots: OrderedDict[str, tuple[str, list[CacheSnapshot]]] = OrderedDict()  # with the client

    def now(self, state: RequestState, layer: int) -> CacheSnapshot | None:
        """Return a layer's entries of a request's first answer; None while none are in the pool.

        Raises:
            OptionError: there is no such layer.
        """
        holder = state.cache()
        if holder is None:
            return None
        (batch_cache, sequence), first_completion = holder, state.completions[0]
        kv = first_completion.kv or figures_of(batch_cache, state.group.cache_factory, self._shapes)[sequence]
        return look(batch_cache, sequence, layer, [*state.ids, *first_completion.tokens], kv)

    def record(self, state: RequestState) -> None:
        """Store the entries of a watched request whose first answer ends.

        The oldest request is dropped.
        """
        if not state.request.watch:
            return
        by_layer = [self.now(state, layer) for layer in range(len(self._shapes))]
        if snapshots := [snapshot for snapshot in by_layer if snapshot is not None]:
            self._snapshots[state.request.request_id] = state.request.client, snapshots
        while len(self._snapshots) > _KEPT_REQUESTS:
            self._snapshots.popitem(last=False)

    def of(self, request_id: str, layer: int, client: str | None = None) -> CacheSnapshot | None:
        """Return the stored entries of a layer.

        None: nothing was recorded, or not of `client`, where one is given.

        Raises:
            OptionError: there is no such layer.
        """
        sender, snapshots = self._snapshots.get(request_id, ("", []))
        if not snapshots or client not in (None, sender):
            return None
        if not 0 <= layer < len(snapshots):
            raise OptionError(f"layer {layer}: the model has layers 0 to {len(snapshots) - 1}")
        return snapshots[layer]
