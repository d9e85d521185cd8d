"""Bytes of pages that a request will hold, computed before it holds any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from millpond.cache.batch_cache import BatchCache, Pages
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.ref_counted_pool import Pool, RefCountedPool
from millpond.cache.tiered.offloaded_pages import side_page_bytes
from millpond.engine.scheduler_request import MemoryNeed
from millpond.kernels.decode_rules import Evict, Signal
from millpond.runner.cache_layout import CacheLayout
from millpond.runner.packed_model import LayerShape
from millpond.tiers.buffers import ALIGNMENT

#: Bytes that a page of a pool counts for.
PageSize = Callable[[RefCountedPool[Any]], int]


def estimate(
    layout: CacheLayout,
    layers: Sequence[LayerShape],
    prompt: int,
    answer: int,
    n: int,
    on_disk: frozenset[int] | None = None,
) -> MemoryNeed:
    """What a request holds at peak: `prompt` tokens and `n` answers of at most `answer` tokens.

    While the prompt is read all of it is held as it is, since nothing is planned before its end, or the budget and a
    chunk where each chunk ends with an eviction; what a plan stores as
    codes, or in pages of fewer bits, is allocated before it is freed. Then a layer holds its budget, with as many more
    entries as its method adds before it evicts or merges again; or, for methods that keep all or grow while decoding,
    those of the answer too. The states of a hybrid have one size, and each answer has its own, as it has of what
    lies outside the pages. Of layers on a disk two are in memory at a time.

    Args:
        on_disk: layers whose pages lie on a disk between passes; None: those of the cache factory.
    """
    on_disk = layout.on_disk if on_disk is None else on_disk
    table = [_layer_need(layout, index, layer, prompt, answer, n, _page_bytes) for index, layer in enumerate(layers)]
    near = [need for index, need in enumerate(table) if index not in on_disk]
    own = layout.state_bytes + layout.unpaged_bytes(prompt, prompt + answer)
    need = _sum([MemoryNeed(own, 0, own), *near])
    if not on_disk:
        return need
    far = [need for index, need in enumerate(table) if index in on_disk]
    beside = [_resident_part(layout, index, layers[index], prompt, answer, n) for index in sorted(on_disk)]
    here = MemoryNeed(*(2 * max(part) for part in zip(*((x.prefill, x.shared, x.each) for x in far), strict=True)))
    runs = n * ((prompt + answer) // layout.pool(layers[0]).slots + 2)
    return replace(_sum([need, *beside, here]), disk=max(x.peak(n) for x in far) + runs * ALIGNMENT)


def estimate_prefix(layout: CacheLayout, layers: Sequence[LayerShape], n_tokens: int, parent: int) -> MemoryNeed:
    """What a common beginning of `n_tokens` holds besides the pages of its first `parent` tokens, which others hold."""
    n_bytes = 0
    for layer in layers:
        pool = layout.prompt_pool(layer)
        pages = -(-n_tokens // pool.slots) - (parent // pool.slots if shares_pages(layout) else 0)
        n_bytes += pool.page_bytes * layer.n_kv_heads * pages
    return MemoryNeed(n_bytes, n_bytes, 0)


def estimate_after_prefix(
    layout: CacheLayout, layers: Sequence[LayerShape], need: MemoryNeed, prompt: int, n: int, begun: int
) -> MemoryNeed:
    """What a request holds besides the full pages of its first `begun` tokens, which others hold longer than it does.

    Args:
        need: what it holds alone. The rest: as of `estimate`.
    """
    if not shares_pages(layout):
        return need
    shared = again = 0
    for index, layer in enumerate(layers):
        own, pool = layout.prompt_pool(layer), layout.pool(layer)
        shared += own.page_bytes * layer.n_kv_heads * (begun // own.slots)
        if own is pool:  # the plan writes while others hold the prompt's pages
            before, _ = decode_entries(layout, index, layer, PageTable(pool, 1, layer.n_kv_heads), prompt, 0)
            again += pool.page_bytes * layer.n_kv_heads * (unquantized(layout, layer, before) // pool.slots + 1)
    if not keeps_pages(layout, layers):
        return replace(need, prefill=need.prefill - shared + again)
    own_part = replace(need, prefill=need.prefill - shared)
    return replace(own_part, each=need.each - shared) if n == 1 else replace(own_part, shared=need.shared - shared)


def shares_pages(layout: CacheLayout) -> bool:
    """Whether the pages of a prompt's beginning stay as they are while the rest of it is read."""
    return not layout.policy.observes_all


def keeps_pages(layout: CacheLayout, layers: Sequence[LayerShape]) -> bool:
    """Whether the pages of a prompt stay those of its answers, since no plan writes others."""
    plain = all(not layout.packed_pools(layer) and not layer.window for layer in layers)
    kept = all(layout.prompt_pool(layer) is layout.pool(layer) for layer in layers)
    return layout.policy.keeps_all and plain and kept


def _resident_part(layout: CacheLayout, index: int, layer: LayerShape, prompt: int, answer: int, n: int) -> MemoryNeed:
    """What a layer on the disk holds in memory: positions, scores and masses, and a page of entries of each head."""
    pool, own = layout.pool(layer), layout.prompt_pool(layer)
    sides = _layer_need(layout, index, layer, prompt, answer, n, side_page_bytes)
    more = own.page_bytes * layer.n_kv_heads, pool.page_bytes * layer.n_kv_heads
    return MemoryNeed(sides.prefill + more[0], sides.shared, sides.each + more[1])


def _layer_need(
    layout: CacheLayout, index: int, layer: LayerShape, prompt: int, answer: int, n: int, page: PageSize
) -> MemoryNeed:
    """Bytes of one layer, each page of a pool counted as `page` says."""
    pool, own = layout.pool(layer), layout.prompt_pool(layer)
    before, after = decode_entries(layout, index, layer, PageTable(pool, 1, layer.n_kv_heads), prompt, answer)
    heads = layer.n_kv_heads
    read = prefill_entries(layout, index, layer, prompt)
    beside = _codes if own is pool else _held
    reading = page(own) * heads * (read // own.slots + 1) + beside(layout, layer, before, prompt, page, settling=True)
    if n == 1:
        return MemoryNeed(reading, 0, _held(layout, layer, after, prompt + answer, page))
    shared = _held(layout, layer, before, prompt, page)
    if _writes_everywhere(layout):  # the prompt's pages stay until every answer has copies of its own
        return MemoryNeed(reading, shared, _held(layout, layer, after, prompt + answer, page))
    each = page(pool) * heads * ((after - before) // pool.slots + 2)
    return MemoryNeed(reading, shared, each + _codes(layout, layer, after - before, answer, page))


def prefill_entries(layout: CacheLayout, index: int, layer: LayerShape, prompt: int) -> int:
    """Entries per KV head that a layer holds at most while it reads a prompt of `prompt` tokens."""
    policy, prompt = layout.policy, layout.within_context(prompt)
    if policy.prefill == "once":
        return prompt
    table = PageTable(layout.pool(layer), 1, layer.n_kv_heads)
    budget = min(prompt, layout.entries(index, prompt, table))
    return min(prompt, budget + (policy.chunk if policy.prefill == "chunks" else 1))


def _sum(needs: Sequence[MemoryNeed]) -> MemoryNeed:
    return MemoryNeed(*(sum(part) for part in zip(*((x.prefill, x.shared, x.each) for x in needs), strict=True)))


def _page_bytes(pool: RefCountedPool[Any]) -> int:
    return pool.page_bytes


def peak_pages(layout: CacheLayout, layers: Sequence[Pages]) -> Pages:
    """Pages of all layers; of those on a disk, which are in memory one at a time, those of the largest one."""
    need: Counter[Pool] = Counter()
    most: Pages = {}
    for index, pages in enumerate(layers):
        if index in layout.on_disk:
            most = {pool: max(most.get(pool, 0), pages.get(pool, 0)) for pool in {**most, **pages}}
        else:
            need.update(pages)
    need.update(most)
    return dict(need)


def plan_pages(
    layout: CacheLayout, layers: Sequence[LayerShape], prompt: int, batch_cache: BatchCache | None = None
) -> Pages:
    """Pages that the plan of a prompt takes in addition to those that it frees before.

    Codes are written before what was read goes, and so are plain pages of fewer bits than the prompt's. Others are
    written when the prompt's have gone, but for those that are shared; `batch_cache`: what was read, None where
    nothing was.
    """
    pages: list[Pages] = []
    may_share = shares_pages(layout)  # else the last pass has left none that others hold
    for index, layer in enumerate(layers):
        need: Counter[Pool] = Counter()
        pool, packed = layout.pool(layer), layout.packed_pools(layer)
        prompt = layout.within_context(prompt)
        before, _ = decode_entries(layout, index, layer, PageTable(pool, 1, layer.n_kv_heads), prompt, 0)
        codes = _code_pages(layout, layer, before, prompt, settling=True)
        need.update({part: n for part, n in zip(packed, codes, strict=True)})
        plain = layer.n_kv_heads * (unquantized(layout, layer, before) // pool.slots + 1)
        held = None if batch_cache is None else batch_cache.layers[index].table
        if layout.prompt_pool(layer) is not pool:
            need[pool] += plain
        elif held is not None and may_share and (packed or layer.window or not layout.policy.keeps_all):
            need[pool] += held.pages_to_renew(plain)
        pages.append(dict(need))
    return peak_pages(layout, pages)


def _held(
    layout: CacheLayout, layer: LayerShape, entries: int, seen: int, page: PageSize, *, settling: bool = False
) -> int:
    """Bytes of `entries` entries per KV head after `seen` tokens: as they are, or but for the newest as codes."""
    pool = layout.pool(layer)
    plain = page(pool) * layer.n_kv_heads * (unquantized(layout, layer, entries) // pool.slots + 1)
    return plain + _codes(layout, layer, entries, seen, page, settling=settling)


def unquantized(layout: CacheLayout, layer: LayerShape, entries: int) -> int:
    """Of `entries` entries per KV head, those that are not quantized."""
    packed, codec = layout.packed_pools(layer), layout.codec(layer)
    if not packed or codec is None:
        return entries
    if codec.tiered:
        return entries + packed[0].slots
    return min(entries, codec.sinks + codec.newest(entries) + packed[0].slots)


def _codes(
    layout: CacheLayout,
    layer: LayerShape,
    entries: int,
    seen: int,
    page: PageSize = _page_bytes,
    *,
    settling: bool = False,
) -> int:
    """Bytes of `entries` entries per KV head as codes, up to a page's worth of them dead; of all tokens, in a tier."""
    pages = _code_pages(layout, layer, entries, seen, settling=settling)
    return sum(page(pool) * n for pool, n in zip(layout.packed_pools(layer), pages, strict=True))


def _code_pages(layout: CacheLayout, layer: LayerShape, entries: int, seen: int, *, settling: bool) -> list[int]:
    """Pages of codes of all KV heads, of each tier by age.

    settling: a plan writes them: all pass through the first tier.
    """
    packed, codec = layout.packed_pools(layer), layout.codec(layer)
    if not packed or codec is None:
        return []
    factor = 2  # a page stays until half of it is dead
    if layout.policy.keeps_all or not (layout.policy.every_step or layout.policy.bounded):
        factor = 1
    most = seen if codec.tiered else factor * entries
    ends = [tier.newest(entries) for tier in codec.tiers[1:]]
    found = []
    for number, (tier, pool) in enumerate(zip(codec.tiers, packed, strict=True)):
        stored = most
        if number < len(ends) and not (settling and number == 0):
            begin = tier.newest(entries)
            stored = min(most, factor * (ends[number] - begin + pool.slots + packed[number + 1].slots))
        found.append(layer.n_kv_heads * (stored // pool.slots + 2))
    return found


def decode_entries(
    layout: CacheLayout, index: int, layer: LayerShape, table: PageTable, prompt: int, answer: int
) -> tuple[int, int]:
    """Entries per KV head, on average over the heads, that a layer holds after the plan, and at most while decoding."""
    policy, total = layout.policy, prompt + answer
    if policy.keeps_all:
        before, after = prompt, total
    else:
        budget = layout.entries(index, total if policy.grows else prompt, table)
        before = min(prompt, budget)
        if policy.bounded:
            after = min(total, budget + policy.plan_every)
        elif policy.heads_may_keep_all:
            before, after = prompt, total
        elif policy.every_step:
            after = min(total, budget + policy.plan_every)
        else:
            after = before + answer
    if layer.window:
        before, after = min(before, layer.window), min(after, layer.window + policy.plan_every)
    return before, max(before, after)


def _writes_everywhere(layout: CacheLayout) -> bool:
    """Whether a decoding step writes to more than the last page of a head, so that answers cannot share pages."""
    policy = layout.policy
    rule, by_rules = policy.decode_rule(0), policy.needs.head_rules is not None
    return rule.evict is not Evict.NEVER or rule.signal is not Signal.NONE or by_rules
