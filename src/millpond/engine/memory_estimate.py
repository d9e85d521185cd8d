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

#: Returns the bytes that a page of a pool counts for.
PageSize = Callable[[RefCountedPool[Any]], int]


def estimate(
    layout: CacheLayout,
    layers: Sequence[LayerShape],
    prompt: int,
    answer: int,
    n: int,
    on_disk: frozenset[int] | None = None,
) -> MemoryNeed:
    """Return the most bytes that a request can hold.

    It has `prompt` tokens and `n` answers of at most `answer` tokens. During prefill: the whole prompt unquantized,
    since nothing is planned before its end, or budget + one chunk if every chunk evicts; a plan allocates quantized
    pages, or pages of fewer bits, before it frees the originals. Afterwards per layer: the budget plus what the method
    adds before it evicts or merges again; methods that keep everything or grow while decoding also hold the answer.
    Hybrids add one fixed state per answer, as each answer has its own entries outside the pages. Of layers on disk two
    are in memory at a time.

    Args:
        layout: Layout of the cache.
        layers: Shapes of the layers.
        prompt: Tokens of the prompt.
        answer: Most tokens of an answer.
        n: Number of answers.
        on_disk: Layers whose pages are on a disk between passes; None: those of the layout.
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
    """Return the bytes of a common beginning of `n_tokens`.

    The pages of its first `parent` tokens, which others hold, do not count.
    """
    n_bytes = 0
    for layer in layers:
        pool = layout.prompt_pool(layer)
        pages = -(-n_tokens // pool.slots) - (parent // pool.slots if shares_pages(layout) else 0)
        n_bytes += pool.page_bytes * layer.n_kv_heads * pages
    return MemoryNeed(n_bytes, n_bytes, 0)


def estimate_after_prefix(
    layout: CacheLayout, layers: Sequence[LayerShape], need: MemoryNeed, prompt: int, n: int, begun: int
) -> MemoryNeed:
    """Return the bytes of a request whose beginning others hold longer than it does.

    The full pages of its first `begun` tokens do not count.

    Args:
        layout: As of `estimate`.
        layers: As of `estimate`.
        need: Bytes that it holds alone.
        prompt: As of `estimate`.
        n: As of `estimate`.
        begun: Tokens of the beginning.
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
    """Return whether the pages of a prompt's beginning stay while the rest of it is read."""
    return not layout.policy.observes_all


def keeps_pages(layout: CacheLayout, layers: Sequence[LayerShape]) -> bool:
    """Return whether a prompt's pages stay those of its answers, since no plan writes others."""
    plain = all(not layout.packed_pools(layer) and not layer.window for layer in layers)
    kept = all(layout.prompt_pool(layer) is layout.pool(layer) for layer in layers)
    return layout.policy.keeps_all and plain and kept


def _resident_part(layout: CacheLayout, index: int, layer: LayerShape, prompt: int, answer: int, n: int) -> MemoryNeed:
    """Return the bytes in memory of a layer on the disk.

    They are positions, scores and masses, and a page of entries of each head.
    """
    pool, own = layout.pool(layer), layout.prompt_pool(layer)
    sides = _layer_need(layout, index, layer, prompt, answer, n, side_page_bytes)
    more = own.page_bytes * layer.n_kv_heads, pool.page_bytes * layer.n_kv_heads
    return MemoryNeed(sides.prefill + more[0], sides.shared, sides.each + more[1])


def _layer_need(
    layout: CacheLayout, index: int, layer: LayerShape, prompt: int, answer: int, n: int, page: PageSize
) -> MemoryNeed:
    """Return the bytes of one layer, each page of a pool counted as `page` says."""
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
    """Return the most entries per KV head that a layer holds while it reads a prompt."""
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
    """Return the pages of all layers.

    Of layers on a disk, which are in memory one at a time, the largest one counts.
    """
    need: Counter[Pool] = Counter()
    max_pages: Pages = {}
    for index, pages in enumerate(layers):
        if index in layout.on_disk:
            max_pages = {pool: max(max_pages.get(pool, 0), pages.get(pool, 0)) for pool in {**max_pages, **pages}}
        else:
            need.update(pages)
    need.update(max_pages)
    return dict(need)


def plan_pages(
    layout: CacheLayout, layers: Sequence[LayerShape], prompt: int, batch_cache: BatchCache | None = None
) -> Pages:
    """Return the pages that the plan of a prompt takes besides those that it frees before.

    Codes are written before the originals are freed, and so are plain pages of fewer bits than the prompt's. Others are
    written when the prompt's are free, except for shared ones.

    Args:
        layout: Layout of the cache.
        layers: Shapes of the layers.
        prompt: Tokens of the prompt.
        batch_cache: Cache of what was read; None where nothing was.
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
    """Return the bytes of entries after `seen` tokens: unquantized, or older ones as codes."""
    pool = layout.pool(layer)
    plain = page(pool) * layer.n_kv_heads * (unquantized(layout, layer, entries) // pool.slots + 1)
    return plain + _codes(layout, layer, entries, seen, page, settling=settling)


def unquantized(layout: CacheLayout, layer: LayerShape, entries: int) -> int:
    """Return how many of `entries` entries per KV head are not quantized."""
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
    """Return the bytes of entries per KV head as codes, up to a page's worth of them dead.

    In a tier the entries are those of all tokens.
    """
    pages = _code_pages(layout, layer, entries, seen, settling=settling)
    return sum(page(pool) * n for pool, n in zip(layout.packed_pools(layer), pages, strict=True))


def _code_pages(layout: CacheLayout, layer: LayerShape, entries: int, seen: int, *, settling: bool) -> list[int]:
    """Return the pages of codes of all KV heads, of each tier by age.

    Args:
        layout: Layout of the cache.
        layer: Shape of the layer.
        entries: Entries per KV head.
        seen: Tokens seen.
        settling: Whether a plan writes them: all pass through the first tier.
    """
    packed, codec = layout.packed_pools(layer), layout.codec(layer)
    if not packed or codec is None:
        return []
    factor = 2  # a page stays until half of it is dead
    if layout.policy.keeps_all or not (layout.policy.every_step or layout.policy.bounded):
        factor = 1
    most = seen if codec.tiered else factor * entries
    ends = [tier.newest(entries) for tier in codec.tiers[1:]]
    pages = []
    for number, (tier, pool) in enumerate(zip(codec.tiers, packed, strict=True)):
        stored = most
        if number < len(ends) and not (settling and number == 0):
            begin = tier.newest(entries)
            stored = min(most, factor * (ends[number] - begin + pool.slots + packed[number + 1].slots))
        pages.append(layer.n_kv_heads * (stored // pool.slots + 2))
    return pages


def decode_entries(
    layout: CacheLayout, index: int, layer: LayerShape, table: PageTable, prompt: int, answer: int
) -> tuple[int, int]:
    """Return the entries per KV head of a layer after the plan, and at most while decoding.

    On average over the heads.
    """
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
    """Return whether a decoding step writes to more than the last page of a head.

    Answers cannot share pages then.
    """
    policy = layout.policy
    rule, by_rules = policy.decode_rule(0), policy.needs.head_rules is not None
    return rule.evict is not Evict.NEVER or rule.signal is not Signal.NONE or by_rules
