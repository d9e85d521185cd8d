"""Bytes of pages that a request will hold, computed before it holds any: sums over its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from millpond.cache.batch_cache import BatchCache, Pages
from millpond.cache.pages.ref_counted_pool import Pool, RefCountedPool
from millpond.cache.tiered.offloaded_pages import side_page_bytes
from millpond.engine.scheduler_request import MemoryNeed
from millpond.kernels.decode_rules import Evict, Signal
from millpond.runner.cache_layout import CacheLayout
from millpond.runner.layer_demand import LayerDemand, LayerPages
from millpond.tiers.buffers import ALIGNMENT

#: Bytes that a page of a pool counts for.
PageSize = Callable[[RefCountedPool[Any]], int]


def estimate(
    layout: CacheLayout, prompt: int, answer: int, n: int, on_disk: frozenset[int] | None = None
) -> MemoryNeed:
    """What a request holds at peak: `prompt` tokens and `n` answers of at most `answer` tokens.

    What a layer holds says `CacheLayout.demands`; what a plan stores as codes, or in pages of fewer bits, is allocated
    before it is freed. The states of a hybrid have one size, and each answer has its own, as it has of what lies
    outside the pages. Of layers on a disk two are in memory at a time.

    Args:
        on_disk: layers whose pages lie on a disk between passes; None: those of the cache factory.
    """
    on_disk = layout.on_disk if on_disk is None else on_disk
    demands = layout.demands(prompt, answer)
    writes_everywhere = _writes_everywhere(layout)
    table = [_layer_need(demand, n, writes_everywhere, _page_bytes) for demand in demands]
    near = [need for index, need in enumerate(table) if index not in on_disk]
    own = layout.state_bytes + layout.unpaged_bytes(prompt, prompt + answer)
    need = _sum([MemoryNeed(own, 0, own), *near])
    if not on_disk:
        return need
    far = [need for index, need in enumerate(table) if index in on_disk]
    beside = [_resident_part(demands[index], n, writes_everywhere) for index in sorted(on_disk)]
    here = MemoryNeed(*(2 * max(part) for part in zip(*((x.prefill, x.shared, x.each) for x in far), strict=True)))
    runs = n * ((prompt + answer) // demands[0].layer.pool.slots + 2)
    return replace(_sum([need, *beside, here]), disk=max(x.peak(n) for x in far) + runs * ALIGNMENT)


def estimate_prefix(layout: CacheLayout, n_tokens: int, parent: int) -> MemoryNeed:
    """What a common beginning of `n_tokens` holds besides the pages of its first `parent` tokens, which others hold."""
    n_bytes = 0
    for layer in layout.layer_layouts:
        pool = layer.prompt_pool
        pages = -(-n_tokens // pool.slots) - (parent // pool.slots if shares_pages(layout) else 0)
        n_bytes += pool.page_bytes * layer.shape.n_kv_heads * pages
    return MemoryNeed(n_bytes, n_bytes, 0)


def estimate_after_prefix(layout: CacheLayout, need: MemoryNeed, prompt: int, n: int, begun: int) -> MemoryNeed:
    """What a request holds besides the full pages of its first `begun` tokens, which others hold longer than it does.

    Args:
        need: what it holds alone. The rest: as of `estimate`.
    """
    if not shares_pages(layout):
        return need
    shared = again = 0
    for demand in layout.demands(prompt, 0):
        layer, pool = demand.layer, demand.layer.prompt_pool
        shared += pool.page_bytes * layer.shape.n_kv_heads * (begun // pool.slots)
        if layer.in_place:  # the plan writes while others hold the prompt's pages
            again += layer.pool.page_bytes * demand.kept_plain_pages
    if not keeps_pages(layout):
        return replace(need, prefill=need.prefill - shared + again)
    own_part = replace(need, prefill=need.prefill - shared)
    return replace(own_part, each=need.each - shared) if n == 1 else replace(own_part, shared=need.shared - shared)


def shares_pages(layout: CacheLayout) -> bool:
    """Whether the pages of a prompt's beginning stay as they are while the rest of it is read."""
    return not layout.policy.observes_all


def keeps_pages(layout: CacheLayout) -> bool:
    """Whether the pages of a prompt stay those of its answers, since no plan writes others."""
    return layout.policy.keeps_all and all(
        layer.codec is None and not layer.shape.window and layer.in_place for layer in layout.layer_layouts
    )


def pages_to_read(layout: CacheLayout, prompt: int, n_tokens: int) -> Pages:
    """Pages that the first `n_tokens` tokens of a prompt of `prompt` tokens take."""
    pages: list[LayerPages] = []
    for demand in layout.demands(prompt, 0):
        pool, entries = demand.layer.prompt_pool, min(n_tokens, demand.prompt_entries)
        pages.append({pool: demand.layer.shape.n_kv_heads * -(-entries // pool.slots)})
    return _peak_pages(layout, pages)


def plan_pages(layout: CacheLayout, prompt: int, batch_cache: BatchCache | None = None) -> Pages:
    """Pages that the plan of a prompt takes in addition to those that it frees before.

    Codes are written before what was read goes, and so are plain pages of fewer bits than the prompt's. Others are
    written when the prompt's have gone, but for those that are shared; `batch_cache`: what was read, None where
    nothing was.
    """
    pages: list[LayerPages] = []
    may_share = shares_pages(layout)  # else the last pass has left none that others hold
    for index, demand in enumerate(layout.demands(layout.within_context(prompt), 0)):
        need, layer = Counter(demand.plan_pages), demand.layer
        held = None if batch_cache is None else batch_cache.layers[index].table
        writes = layer.codec is not None or layer.shape.window or not layout.policy.keeps_all
        if layer.in_place and held is not None and may_share and writes:
            need[layer.pool] += held.pages_to_renew(demand.kept_plain_pages)
        pages.append(dict(need))
    return _peak_pages(layout, pages)


def _peak_pages(layout: CacheLayout, layers: Sequence[LayerPages]) -> Pages:
    """Pages of all layers; of those on a disk, which are in memory one at a time, those of the largest one."""
    need: Counter[RefCountedPool[Any]] = Counter()
    most: LayerPages = {}
    for index, pages in enumerate(layers):
        if index in layout.on_disk:
            most = {pool: max(most.get(pool, 0), pages.get(pool, 0)) for pool in {**most, **pages}}
        else:
            need.update(pages)
    need.update(most)
    return dict[Pool, int](need.items())


def _layer_need(demand: LayerDemand, n: int, writes_everywhere: bool, page: PageSize) -> MemoryNeed:
    """Bytes of one layer, each page of a pool counted as `page` says."""
    reading = _n_bytes(demand.prompt_pages, page) + _n_bytes(demand.plan_pages, page)
    if n == 1:
        return MemoryNeed(reading, 0, _n_bytes(demand.decode_pages, page))
    # where answers write everywhere, the prompt's pages stay until each of them has copies of its own
    each = demand.decode_pages if writes_everywhere else demand.answer_pages
    return MemoryNeed(reading, _n_bytes(demand.kept_pages, page), _n_bytes(each, page))


def _resident_part(demand: LayerDemand, n: int, writes_everywhere: bool) -> MemoryNeed:
    """What a layer on the disk holds in memory: positions, scores and masses, and a page of entries of each head."""
    sides, heads = _layer_need(demand, n, writes_everywhere, side_page_bytes), demand.layer.shape.n_kv_heads
    more = demand.layer.prompt_pool.page_bytes * heads, demand.layer.pool.page_bytes * heads
    return MemoryNeed(sides.prefill + more[0], sides.shared, sides.each + more[1])


def _sum(needs: Sequence[MemoryNeed]) -> MemoryNeed:
    return MemoryNeed(*(sum(part) for part in zip(*((x.prefill, x.shared, x.each) for x in needs), strict=True)))


def _n_bytes(pages: LayerPages, page: PageSize) -> int:
    return sum(page(pool) * n for pool, n in pages.items())


def _page_bytes(pool: RefCountedPool[Any]) -> int:
    return pool.page_bytes


def _writes_everywhere(layout: CacheLayout) -> bool:
    """Whether a decoding step writes to more than the last page of a head, so that answers cannot share pages."""
    policy = layout.policy
    rule, by_rules = policy.decode_rule(0), policy.needs.head_rules is not None
    return rule.evict is not Evict.NEVER or rule.signal is not Signal.NONE or by_rules
