"""Blocks of requests that evict: a specification of full attention, and the manager that it selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from millpond_vllm.event_times import EventTimes
from millpond_vllm.figures import EvictionCounts
from millpond_vllm.messages import Eviction
from millpond_vllm.settings import KEY, BlockRules, EngineSettings, RequestSettings


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(FullAttentionSpec):
    """Full attention whose requests evict; the memory of a block is that of full attention."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> EvictingSpec:
        """Return the specification of a layer of full attention that evicts."""
        return cls(**{part.name: getattr(spec, part.name) for part in fields(spec)})

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return the bytes that the longest text holds at once, if it evicts inside its prompt."""
        whole: int = super().max_memory_usage_bytes(vllm_config)
        settings = EngineSettings.parse((vllm_config.additional_config or {}).get(KEY))
        if settings.prefill == "once":
            return whole
        length = vllm_config.model_config.max_model_len
        rules = BlockRules(settings, settings.policy(), self.block_size, pool=0)
        peak = rules.times(length, RequestSettings()).peak_blocks(length)
        return min(whole, (peak + 1) * int(self.page_size_bytes))


class EvictingManager(FullAttentionManager):
    """Blocks of full attention, which events replace by packed ones.

    Attributes:
        times: Events of each request.
        events: Position of the last event of a request that has evicted.
        counts: Figures of each request, and of all.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times: dict[str, EventTimes] = {}
        self.events: dict[str, int] = {}
        self.counts: dict[str, EvictionCounts] = {}
        self.total = EvictionCounts()

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """False: block i of a row no longer holds the tokens from i * block size on."""
        return False

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Return the blocks that a request needs; of a whole text no more than it holds at once."""
        times = self.times.get(request_id)
        evicts_inside = times is not None and times.stride > 0
        self.max_admission_blocks_per_request = times.peak_blocks(num_tokens) if times and evicts_inside else None
        blocks: int = super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
        return blocks

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Forget the events of a request that ended or was preempted, and return its blocks."""
        self.events.pop(request_id, None)
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        return blocks

    def due(self, request_id: str, computed: int) -> bool:
        """Whether a request with `computed` tokens has to evict before it goes on."""
        times = self.times.get(request_id)
        return times is not None and times.next(self.events.get(request_id, 0)) <= computed

    def free_short(self, request_id: str, computed: int) -> int:
        """Return how many more free blocks the next event of a request needs; 0 if it has enough."""
        times = self.times[request_id]
        if request_id in self.events:
            return 0
        own = sum(block.ref_cnt == 1 for block in self.req_to_blocks[request_id][: times.left(computed)])
        free = self.block_pool.get_num_free_blocks()
        return 0 if own >= times.packed else max(0, times.packed - int(free))

    def evict(self, request_id: str, computed: int) -> Eviction:
        """Swap the blocks of a request for packed ones, and return what the workers have to do.

        The first event packs into fresh blocks, so that the originals stay valid for others and for the prefix cache;
        later ones into the request's own packed blocks. Where too few blocks are free, the first event takes the
        request's own unshared blocks, and the prefix cache forgets them.
        """
        times, blocks = self.times[request_id], self.req_to_blocks[request_id]
        left, packed = times.left(computed), times.packed
        before = self.events.get(request_id)
        source = [block for block in blocks[:left] if not block.is_null]
        counts = self.counts.setdefault(request_id, EvictionCounts())
        if before is not None:
            target = source[:packed]
        elif self.block_pool.get_num_free_blocks() >= packed:
            target = self.block_pool.get_new_blocks(packed)
        else:
            target = [block for block in source if block.ref_cnt == 1][:packed]
            assert len(target) == packed, "the scheduler frees blocks before an event that needs them"
            self.block_pool.evict_blocks({block.block_id for block in target})
            counts.in_place += 1
            self.total.in_place += 1
        own = {block.block_id for block in target}
        freed = [block for block in source if block.block_id not in own]
        tail = blocks[left : -(-computed // self.block_size)]
        blocks[:] = [*target, *[self._null_block] * (left - packed), *blocks[left:]]
        self.block_pool.free_blocks(reversed(freed))
        self.events[request_id] = computed
        for one in (counts, self.total):
            one.events += 1
            one.freed += len(source) - len(target)
        left_before = 0 if before is None else times.left(before)
        return Eviction(request_id, _ids(source), _ids(target), _ids(tail), computed, left_before, _ids(blocks))


def _ids(blocks: Sequence[Any]) -> list[int]:
    return [block.block_id for block in blocks]
