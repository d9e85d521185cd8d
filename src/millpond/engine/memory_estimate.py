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
from millpond.errors import BudgetError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.runner.cache_layout import CacheLayout
from millpond.runner.layer_demand import LayerDemand, LayerPages
from millpond.tiers.buffers import ALIGNMENT

#: Returns the bytes that a page of a pool counts for.
PageSize = Callable[[RefCountedPool[Any]], int]


def estimate(
    layout: CacheLayout, prompt: int, answer: int, n: int, on_disk: frozenset[int] | None = None
) -> MemoryNeed:
    """Return the most bytes that a request can hold.

    It has `prompt` tokens and `n` answers of at most `answer` tokens. `CacheLayout.demands` says what a layer holds;
    quantized pages, or pages of fewer bits, are allocated by a plan before it frees the originals. Hybrids add one
    fixed state per answer, as each answer has its own entries outside the pages. Of layers on disk two are in memory at
    a time.

    Args:
        layout: Layout of the cache.
        prompt: Tokens of the prompt.
        answer: Most tokens of an answer.
        n: Number of answers.
        on_disk: Layers whose pages are on a disk between passes; None: those of the layout.
    """
    on_disk = layout.on_disk if on_disk is None else on_disk
    demands = layout.demands(prompt, answer)
    unpaged_bytes = layout.state_bytes + layout.unpaged_bytes(prompt, prompt + answer)
    unpaged = MemoryNeed(unpaged_bytes, 0, unpaged_bytes)
    here = [index for index in range(len(demands)) if index not in layout.on_host]
    need = _sum([unpaged, _of_layers(layout, demands, here, n, on_disk)])
    if layout.on_host:
        host = _of_layers(layout, demands, sorted(layout.on_host), n, on_disk)
        need = _scaled(layout, need, host)
    if not on_disk:
        return need
    writes_everywhere = _writes_everywhere(layout)
    peaks = [_layer_need(demands[index], n, writes_everywhere, _page_bytes).peak(n) for index in on_disk]
    runs = n * ((prompt + answer) // demands[0].layer.pool.slots + 2)
    return replace(need, disk=max(peaks) + runs * ALIGNMENT)


def check_limit(layout: CacheLayout, limit_bytes: int | None, is_given: bool = True) -> None:
    """Check that a limit holds a request of one token and an answer of one, in whole pages.

    Args:
        layout: Layout of the cache of requests that name no options.
        limit_bytes: Most bytes of all caches; None: no limit.
        is_given: Whether the user gave it; else it is what a GPU has left.

    Raises:
        BudgetError: it does not, so each request would be refused.
    """
    if limit_bytes is None:
        return
    with layout.silent():
        least = estimate(layout, layout.within_context(1), 1, 1).peak(1)
    if limit_bytes < least:
        what, way_out = f"kv_memory={limit_bytes:,} bytes", f"give {least:,} or more, lower page_slots, or leave "
        way_out += "kv_memory out for no limit"
        if not is_given:
            what = f"what the GPU has left, {limit_bytes:,} bytes,"
            way_out = "lower max_step_tokens, max_running or page_slots, or choose a smaller model"
        raise BudgetError(
            f"{what} holds no request: one of a single token takes {least:,} bytes, with whole pages in each layer "
            f"and KV head; {way_out}"
        )


def _of_layers(
    layout: CacheLayout, demands: Sequence[LayerDemand], layers: Sequence[int], n: int, on_disk: frozenset[int]
) -> MemoryNeed:
    """Return the bytes of memory of some layers."""
    writes_everywhere = _writes_everywhere(layout)
    table = {index: _layer_need(demands[index], n, writes_everywhere, _page_bytes) for index in layers}
    need = _sum([MemoryNeed(0, 0, 0), *(table[index] for index in layers if index not in on_disk)])
    far = [index for index in layers if index in on_disk]
    if not far:
        return need
    resident_parts = [_resident_part(demands[index], n, writes_everywhere) for index in far]
    parts = zip(*((table[index].prefill, table[index].shared, table[index].each) for index in far), strict=True)
    streamed = MemoryNeed(*(2 * max(part) for part in parts))
    return _sum([need, *resident_parts, streamed])


def _scaled(layout: CacheLayout, near: MemoryNeed, host: MemoryNeed) -> MemoryNeed:
    """Return what counts against the limit of both tiers, see `TierLimits.scaled`."""
    whole = layout.tier_limits
    assert whole is not None, "layers on the host have a limit of their own"
    pairs = ((near.prefill, host.prefill), (near.shared, host.shared), (near.each, host.each))
    return MemoryNeed(*(whole.scaled(*pair) for pair in pairs))


def estimate_prefix(layout: CacheLayout, n_tokens: int, parent: int) -> MemoryNeed:
    """Return the bytes of a common beginning of `n_tokens`.

    The pages of its first `parent` tokens, which others hold, do not count. Of layers on a disk those in memory count:
    the positions and scores of all entries, and while it is read the pages of a pass.
    """
    n_bytes = 0
    if layout.on_disk:
        whole = estimate(layout, n_tokens, 0, 1)
        demands = layout.demands(n_tokens, 0)
        held = sum(
            _n_bytes(demand.prompt_pages, _page_bytes)
            if index not in layout.on_disk
            else _n_bytes(demand.prompt_pages, side_page_bytes)
            + demand.layer.prompt_pool.page_bytes * demand.layer.shape.n_kv_heads
            for index, demand in enumerate(demands)
        )
        return MemoryNeed(max(whole.prefill, held), held, 0, whole.disk)
    for layer in layout.layer_layouts:
        pool = layer.prompt_pool
        pages = -(-n_tokens // pool.slots) - (parent // pool.slots if shares_pages(layout) else 0)
        n_bytes += pool.page_bytes * layer.shape.n_kv_heads * pages
    return MemoryNeed(n_bytes, n_bytes, 0)


def estimate_after_prefix(layout: CacheLayout, need: MemoryNeed, prompt: int, n: int, begun: int) -> MemoryNeed:
    """Return the bytes of a request whose beginning others hold longer than it does.

    The full pages of its first `begun` tokens do not count.

    Args:
        layout: As of `estimate`.
        need: Bytes that it holds alone.
        prompt: As of `estimate`.
        n: As of `estimate`.
        begun: Tokens of the beginning.
    """
    if not shares_pages(layout):
        return need
    shared = rewritten = 0
    for index, demand in enumerate(layout.demands(prompt, 0)):
        if index in layout.on_disk:
            continue  # its pages are in memory during its pass alone
        layer, pool = demand.layer, demand.layer.prompt_pool
        shared += pool.page_bytes * layer.shape.n_kv_heads * (begun // pool.slots)
        if layer.in_place:  # the plan writes while others hold the prompt's pages
            rewritten += layer.pool.page_bytes * demand.kept_plain_pages
    if not keeps_pages(layout):
        return replace(need, prefill=need.prefill - shared + rewritten)
    own_part = replace(need, prefill=need.prefill - shared)
    return replace(own_part, each=need.each - shared) if n == 1 else replace(own_part, shared=need.shared - shared)


def shares_pages(layout: CacheLayout) -> bool:
    """Return whether the pages of a prompt's beginning stay while the rest of it is read."""
    return not layout.policy.observes_all


def keeps_pages(layout: CacheLayout) -> bool:
    """Return whether a prompt's pages stay those of its answers, since no plan writes others."""
    return layout.policy.keeps_all and all(
        layer.codec is None and not layer.shape.window and layer.in_place for layer in layout.layer_layouts
    )


def pages_to_read(layout: CacheLayout, prompt: int, n_tokens: int) -> Pages:
    """Return the pages that the first `n_tokens` tokens of a prompt of `prompt` tokens take."""
    pages: list[LayerPages] = []
    for demand in layout.demands(prompt, 0):
        pool, entries = demand.layer.prompt_pool, min(n_tokens, demand.prompt_entries)
        pages.append({pool: demand.layer.shape.n_kv_heads * -(-entries // pool.slots)})
    return _peak_pages(layout, pages)


def plan_pages(layout: CacheLayout, prompt: int, batch_cache: BatchCache | None = None) -> Pages:
    """Return the pages that the plan of a prompt takes besides those that it frees before.

    Codes are written before the originals are freed, and so are plain pages of fewer bits than the prompt's. Others are
    written when the prompt's are free, except for shared ones.

    Args:
        layout: Layout of the cache.
        prompt: Tokens of the prompt.
        batch_cache: Cache of what was read; None where nothing was.
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
    """Return the pages of all layers.

    Of layers on a disk, which are in memory one at a time, the largest one counts.
    """
    need: Counter[RefCountedPool[Any]] = Counter()
    max_pages: LayerPages = {}
    for index, pages in enumerate(layers):
        if index in layout.on_disk:
            max_pages = {pool: max(max_pages.get(pool, 0), pages.get(pool, 0)) for pool in {**max_pages, **pages}}
        else:
            need.update(pages)
    need.update(max_pages)
    return dict[Pool, int](need.items())


def _layer_need(demand: LayerDemand, n: int, writes_everywhere: bool, page: PageSize) -> MemoryNeed:
    """Return the bytes of one layer, each page of a pool counted as `page` says."""
    reading = _n_bytes(demand.prompt_pages, page) + _n_bytes(demand.plan_pages, page)
    if n == 1:
        return MemoryNeed(reading, 0, _n_bytes(demand.decode_pages, page))
    # where answers write everywhere, the prompt's pages stay until each of them has copies of its own
    each = demand.decode_pages if writes_everywhere else demand.answer_pages
    return MemoryNeed(reading, _n_bytes(demand.kept_pages, page), _n_bytes(each, page))


def _resident_part(demand: LayerDemand, n: int, writes_everywhere: bool) -> MemoryNeed:
    """Return the bytes in memory of a layer on the disk.

    They are positions, scores and masses, and a page of entries of each head.
    """
    sides, heads = _layer_need(demand, n, writes_everywhere, side_page_bytes), demand.layer.shape.n_kv_heads
    head_page_bytes = demand.layer.prompt_pool.page_bytes * heads, demand.layer.pool.page_bytes * heads
    return MemoryNeed(sides.prefill + head_page_bytes[0], sides.shared, sides.each + head_page_bytes[1])


def _sum(needs: Sequence[MemoryNeed]) -> MemoryNeed:
    return MemoryNeed(*(sum(part) for part in zip(*((x.prefill, x.shared, x.each) for x in needs), strict=True)))


def _n_bytes(pages: LayerPages, page: PageSize) -> int:
    return sum(page(pool) * n for pool, n in pages.items())


def _page_bytes(pool: RefCountedPool[Any]) -> int:
    return pool.page_bytes


def _writes_everywhere(layout: CacheLayout) -> bool:
    """Return whether a decoding step writes to more than the last page of a head.

    It may also move entries. Answers cannot share pages then.
    """
    policy = layout.policy
    rule, by_rules = policy.decode_rule(0), policy.needs.head_rules is not None
    return rule.evict is not Evict.NEVER or rule.signal is not Signal.NONE or by_rules or layout.blocks_leave
