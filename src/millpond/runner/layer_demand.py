"""Entries and pages that one layer will hold of a request, computed before it holds any."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from millpond.cache.pages.pool import PagePool, QuantizedPool
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.codec import Codec
from millpond.runner.packed_model import LayerShape

#: Pages by pool.
LayerPages = dict[RefCountedPool[Any], int]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Pools and number format of one layer.

    Attributes:
        shape: Numbers that the layer stores of a token.
        pool: Pool of plain entries.
        prompt_pool: Pool of a prompt's entries until its plan.
        packed_pools: Pools of codes, one per age band; () where entries are stored plain.
        codec: Codec of its entries; None where they are stored plain.
        evicts_codes: Whether codes die while decoding, whose page stays until half of it is dead.
    """

    shape: LayerShape
    pool: PagePool
    prompt_pool: PagePool
    packed_pools: tuple[QuantizedPool, ...]
    codec: Codec | None
    evicts_codes: bool

    @property
    def in_place(self) -> bool:
        """Whether the pages of a prompt come from the pool of what its plan keeps."""
        return self.prompt_pool is self.pool

    def unquantized(self, entries: int) -> int:
        """Return how many of `entries` entries per KV head are not quantized."""
        if self.codec is None:
            return entries
        if self.codec.tiered:
            return (entries if len(self.packed_pools) == 1 else 0) + self.packed_pools[0].slots
        return min(entries, self.codec.sinks + self.codec.newest(entries) + self.packed_pools[0].slots)

    def plain_pages(self, entries: int) -> int:
        """Return the pages of the unquantized ones of `entries` entries per KV head."""
        return self.shape.n_kv_heads * (self.unquantized(entries) // self.pool.slots + 1)

    def code_pages(self, entries: int, seen: int, *, is_plan: bool = False) -> LayerPages:
        """Return the pages of codes of each age band.

        Args:
            entries: Entries per KV head, up to a page's worth of them dead.
            seen: Tokens of the text, all of which a low-bit copy holds.
            is_plan: A plan writes them: all pass through the first age band.
        """
        codec = self.codec
        if codec is None:
            return {}
        if codec.tiered and len(self.packed_pools) > 1:  # the upper tier is written anew before its old pages go
            upper, lower = self.packed_pools
            heads = self.shape.n_kv_heads
            return {upper: heads * (2 * entries // upper.slots + 4), lower: heads * (seen // lower.slots + 2)}
        factor = 2 if self.evicts_codes else 1
        stored = seen if codec.tiered else factor * entries
        ends = [tier.newest(entries) for tier in codec.tiers[1:]]
        pages: LayerPages = {}
        for number, (tier, pool) in enumerate(zip(codec.tiers, self.packed_pools, strict=True)):
            in_band = stored
            if number < len(ends) and not (is_plan and number == 0):
                band = ends[number] - tier.newest(entries) + pool.slots + self.packed_pools[number + 1].slots
                in_band = min(stored, factor * band)
            pages[pool] = self.shape.n_kv_heads * (in_band // pool.slots + 2)
        return pages

    def pages(self, entries: int, seen: int) -> LayerPages:
        """Return the plain and code pages of `entries` entries per KV head after `seen` tokens."""
        return {self.pool: self.plain_pages(entries), **self.code_pages(entries, seen)}

    def kv_bytes(self, entries: float) -> float:
        """Return the bytes of keys and values of `entries` entries per KV head, in their formats."""
        rest = entries if self.codec is None else min(entries, self.unquantized(int(entries)))
        n_bytes = rest * self.pool.kv_bytes_per_page / self.pool.slots
        for number, pool in enumerate(self.packed_pools):
            below = entries
            if self.codec is not None and number + 1 < len(self.packed_pools):
                below = min(entries, self.codec.tiers[number + 1].newest(int(entries)))
            n_bytes += max(below - rest, 0) * pool.kv_bytes_per_page / pool.slots
            rest = max(rest, below)
        return self.shape.n_kv_heads * n_bytes


@dataclass(frozen=True, slots=True)
class LayerDemand:
    """Entries and pages of one layer for a prompt and its answers.

    Entries are per KV head, pages of all KV heads.

    Attributes:
        layer: Pools and number format of the layer.
        prompt_entries: Entries at most while the prompt is read.
        kept_entries: Entries after the plan of the prompt, on average over the heads.
        decode_entries: The same at most while an answer is decoded.
        prompt_tokens: Tokens of the prompt.
        answer_tokens: Tokens of an answer at most.
    """

    layer: LayerLayout
    prompt_entries: int
    kept_entries: int
    decode_entries: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def mean_entries(self) -> float:
        """Entries on average while an answer is decoded."""
        return (self.kept_entries + self.decode_entries) / 2

    @property
    def prompt_bytes(self) -> float:
        """Bytes of keys and values while the prompt is read."""
        pool = self.layer.prompt_pool
        return self.layer.shape.n_kv_heads * self.prompt_entries * pool.kv_bytes_per_page / pool.slots

    @property
    def prompt_pages(self) -> LayerPages:
        """Pages of the prompt while it is read."""
        layer = self.layer
        return {layer.prompt_pool: layer.shape.n_kv_heads * (self.prompt_entries // layer.prompt_pool.slots + 1)}

    @property
    def kept_plain_pages(self) -> int:
        """Pages of the kept entries that are not quantized."""
        return self.layer.plain_pages(self.kept_entries)

    @property
    def plan_pages(self) -> LayerPages:
        """Pages that the plan of the prompt writes before it frees those of the prompt: codes, and what changes pools.

        Plain entries that stay in their pool are written when the prompt's pages have gone.
        """
        need: Counter[RefCountedPool[Any]] = Counter(
            self.layer.code_pages(self.kept_entries, self.prompt_tokens, is_plan=True)
        )
        if not self.layer.in_place:
            need[self.layer.pool] += self.kept_plain_pages
        return dict(need)

    @property
    def kept_pages(self) -> LayerPages:
        """Pages after the plan of the prompt."""
        return self.layer.pages(self.kept_entries, self.prompt_tokens)

    @property
    def decode_pages(self) -> LayerPages:
        """Pages at most while an answer is decoded, those of the prompt among them."""
        return self.layer.pages(self.decode_entries, self.prompt_tokens + self.answer_tokens)

    @property
    def answer_pages(self) -> LayerPages:
        """Pages at most of an answer that shares those of the prompt with others."""
        layer, entries = self.layer, self.decode_entries - self.kept_entries
        plain = layer.shape.n_kv_heads * (entries // layer.pool.slots + 2)
        return {layer.pool: plain, **layer.code_pages(entries, self.answer_tokens)}
