"""Snapshots of what a layer holds of a request, taken while it runs and once more when it ends."""

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

#: Watched requests that are over and whose memory is still known.
_KEPT_REQUESTS = 8


def look(batch_cache: BatchCache, sequence: int, layer: int, ids: Sequence[int], kv: KVStats) -> CacheSnapshot:
    """What `layer` holds of one sequence whose text is `ids`, as far as the cache has seen it.

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
            held = (positions >= 0) & (positions < seen)
            places = positions[held].long()
            holders.index_add_(0, places, torch.ones(len(places)))
            sums.index_add_(0, places, scores[held])
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
    """Positions in the text (H, T) of what one sequence holds, on the host, -1 where there is nothing: of entries as
    they are, and of codes.
    """
    table = layer_cache.table
    if table is None:
        return []
    if not table.page_lists.pool.arrays.n_arenas and table.quantized is None:
        return []
    return [positions for positions, _ in _marks(layer_cache, sequence)]


def _marks(layer_cache: LayerCache, sequence: int) -> list[tuple[Tensor, Tensor]]:
    """Positions in the text (H, T) and scores (H, T) of what one sequence holds, on the host; -1 where nothing is.

    Keys and values stay where they are. Entries that are stored as they are come first, then those that are codes.
    """
    table = layer_cache.table
    assert table is not None, "a layer that holds something"
    found = [_plain_marks(table, sequence)] if table.page_lists.pool.arrays.n_arenas else []
    if (quantized := table.quantized) is not None:
        rows = quantized.rows(sequence)
        found.append((quantized.positions(rows).cpu(), quantized.scores(rows).cpu()))
    if layer_cache.tracker.closed[sequence]:
        found = [(layer_cache.text_positions(sequence, at), scores) for at, scores in found]
    return found


def _plain_marks(table: PageTable, sequence: int) -> tuple[Tensor, Tensor]:
    """Those of entries that are stored as they are."""
    rows, arrays = table.rows(sequence), table.page_lists.pool.arrays
    pages, lens = table.pages[rows], table.lens[rows].cpu()  # (H, n), (H,)
    positions = gather(arrays, pages, arrays.positions).cpu()
    empty = torch.arange(positions.shape[1]) >= lens[:, None]
    return positions.masked_fill(empty, -1), gather(arrays, pages, arrays.scores).cpu()


class SnapshotStore:
    """What requests remember, and what the last watched ones remembered when they ended.

    Args:
        layers: what each layer of the model stores.
    """

    def __init__(self, layers: list[LayerShape]) -> None:
        self._shapes = layers
        self._layers: OrderedDict[str, tuple[str, list[CacheSnapshot]]] = OrderedDict()  # with the client

    def now(self, state: RequestState, layer: int) -> CacheSnapshot | None:
        """What a layer remembers of a request's first answer; None while it holds nothing in the pool.

        Raises:
            OptionError: there is no such layer.
        """
        found = state.cache()
        if found is None:
            return None
        (batch_cache, sequence), first = found, state.completions[0]
        kv = first.kv or figures_of(batch_cache, state.group.cache_factory, self._shapes)[sequence]
        return look(batch_cache, sequence, layer, [*state.ids, *first.tokens], kv)

    def record(self, state: RequestState) -> None:
        """A request's first answer ends: store what its cache holds, if it is watched; the oldest is dropped."""
        if not state.request.watch:
            return
        found = [self.now(state, layer) for layer in range(len(self._shapes))]
        if layers := [memory for memory in found if memory is not None]:
            self._layers[state.request.request_id] = state.request.client, layers
        while len(self._layers) > _KEPT_REQUESTS:
            self._layers.popitem(last=False)

    def of(self, request_id: str, layer: int, client: str | None = None) -> CacheSnapshot | None:
        """What a layer held; None if nothing was noted, or not of this client, where one is given.

        Raises:
            OptionError: there is no such layer.
        """
        sender, found = self._layers.get(request_id, ("", []))
        if not found or client not in (None, sender):
            return None
        if not 0 <= layer < len(found):
            raise OptionError(f"layer {layer}: the model has layers 0 to {len(found) - 1}")
        return found[layer]
