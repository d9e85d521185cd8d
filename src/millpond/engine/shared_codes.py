"""Codes of the beginnings of prompts, which requests in flight hold together.

A page of codes depends on the entries in it alone, unless its format looks at the whole prompt (`think`, `mikv`). So
the pages of what prompts have in common are encoded once, by the request whose prompt ends first; a request whose
prompt ends later holds these pages, and its own codes follow them. Nothing is kept once no request holds a page.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.cache.batch_cache import BatchCache
from millpond.cache.entries.quantize import begin_with_codes, n_first_codes
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.cache.prefix_tree import PrefixTree
from millpond.errors import PoolFullError
from millpond.kernels.packed.layout import PackedArrays
from millpond.runner.cache_layout import CacheLayout


@dataclass(frozen=True, slots=True)
class _Codes:
    """Codes of one layer of a prompt, in blocks of the same tokens for all layers.

    Attributes:
        table: Table of the layer, of one sequence.
        store: Its codes.
        per_block: Pages of a block.
    """

    table: PageTable
    store: QuantizedStore
    per_block: int

    @property
    def pool(self) -> RefCountedPool[PackedArrays]:
        """Pool of the pages."""
        return self.store.pool

    def page_column(self, number: int) -> PageIds:
        """Return the pages of the `number`-th block, head by head."""
        return self.store.page_columns(slice(number * self.per_block, (number + 1) * self.per_block))

    def share(self) -> None:
        """Note that others may hold these pages too."""
        self.store.share()


class SharedCodes:
    """Pages of codes by the tokens that they stand for, as long as a request holds them.

    It is for prompts of which `can_share` is true, whose formats do not look at the whole prompt.

    Args:
        unit: Prompts share multiples of this many tokens.
    """

    def __init__(self, unit: int = 1) -> None:
        self.tree = PrefixTree()
        self._unit = unit
        self._released = -1

    def begin(self, key: Hashable, ids: npt.NDArray[np.int64], layout: CacheLayout, batch_cache: BatchCache) -> None:
        """Let a prompt hold the codes of its beginning before its own are made.

        Args:
            key: Key of prompts whose entries are stored alike.
            ids: Tokens of the prompt, (n,).
            layout: Layout of its cache.
            batch_cache: Its cache.
        """
        layers = self._layers(layout, batch_cache, len(ids))
        if not layers or any(layer.store.lens.any() for layer in layers):
            return
        sinks, slots = _sinks_and_slots(layers)
        path = self.tree.find((key, ids[:sinks].tobytes()), ids[sinks:], slots)
        own = min(n_first_codes(layer.store, len(ids)) // layer.per_block for layer in layers)
        alike = (sinks + len(path) * slots) // self._unit * self._unit  # what was read in the same passes
        n = min(len(path), own, max(alike - sinks, 0) // slots)
        if not n:
            return
        for index, layer in enumerate(layers):
            heads = layer.store.n_kv_heads
            pages = [node.pages[index].reshape(heads, -1) for node in path[:n]]
            with suppress(PoolFullError):  # the layer then makes codes of its own
                begin_with_codes(layer.table, np.concatenate(pages, 1))

    def keep(self, key: Hashable, ids: npt.NDArray[np.int64], layout: CacheLayout, batch_cache: BatchCache) -> None:
        """Let others hold the codes of a prompt, once they are made; arguments as for `begin`."""
        layers = self._layers(layout, batch_cache, len(ids))
        if not layers:
            return
        sinks, slots = _sinks_and_slots(layers)
        n = min(int(layer.store.lens.min()) // slots for layer in layers)
        if n:
            tokens = ids[sinks : sinks + n * slots]
            self.tree.keep((key, ids[:sinks].tobytes()), tokens, layers, slots=slots)

    def release_unheld(self) -> None:
        """Drop the pages that no request holds."""
        if len(self.tree) and self.tree.n_releases != self._released:
            self.tree.release_unheld(())
            self._released = self.tree.n_releases

    def _layers(self, layout: CacheLayout, batch_cache: BatchCache, n_tokens: int) -> list[_Codes]:
        """Return the codes of the layers whose pages prompts can share.

        None if the prompt does not hold all of its tokens, or layers leave out different first tokens.
        """
        if not layout.policy.keeps_all:
            return []
        found: list[tuple[PageTable, QuantizedStore]] = []
        for layer, layer_cache in zip(layout.layer_layouts, batch_cache.layers, strict=True):
            table = layer_cache.table
            if table is None or table.is_offloaded or not isinstance(table.quantized, QuantizedStore):
                continue
            if layer.shape.window:
                continue
            if table.n_seq != 1 or table.quantized.n_evicted.any() or (table.entries() != n_tokens).any():
                return []
            found.append((table, table.quantized))
        slots = max((store.slots for _, store in found), default=1)
        if len({store.codec.sinks for _, store in found}) > 1:
            return []
        return [_Codes(table, store, slots // store.slots) for table, store in found]


def _sinks_and_slots(layers: list[_Codes]) -> tuple[int, int]:
    """Return the first tokens that stay plain, and the tokens of a block."""
    first = layers[0]
    return first.store.codec.sinks, first.store.slots * first.per_block
