"""Scores that entries are written with, by trained networks over queries, keys and values before RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from millpond import Policy
from millpond_vllm.block_numbers import BlockNumbers

if TYPE_CHECKING:
    from millpond_vllm.worker_state import EvictingLayer

#: Tokens that are scored at a time.
TOGETHER = 1024


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of a step.

    Attributes:
        slots: (T,) places in the cache.
        positions: (T,) int64.
    """

    slots: Tensor
    positions: Tensor


class EntryScores(BlockNumbers):
    """Scores of all entries: those of requests that keep everything too, whose blocks others may find as a prefix.

    Args:
        layers: Layers that evict.
        block: Tokens of a block.
        policy: Policy of the engine, with networks of the model.
    """

    def __init__(self, layers: list[EvictingLayer], block: int, policy: Policy) -> None:
        super().__init__(layers, block)
        self._heads = policy.entry_scores

    def plan(self, given: Any, lengths: Tensor) -> StepTokens:
        """Return the tokens of a step.

        Args:
            given: vLLM's common metadata of the step.
            lengths: (S,) tokens of each request's text, those that left among them.
        """
        n = int(given.query_start_loc_cpu[-1])  # without what fills up a recorded graph
        starts = given.query_start_loc.long()
        row = torch.repeat_interleave(starts.diff(), output_size=n)  # the request of each token
        before = lengths.long() - starts.diff()
        positions = before[row] + torch.arange(n, device=row.device) - starts[row]
        return StepTokens(given.slot_mapping[:n].long(), positions)

    def write(self, layer: EvictingLayer, queries: Tensor, keys: Tensor, values: Tensor, step: StepTokens) -> None:
        """Score a step's tokens: queries (T, Hq, D), keys and values (T, Hkv, ...) after RoPE."""
        assert self._heads is not None, "the method's networks are checked when the engine starts"
        scores = self.at(layer)
        for begin in range(0, len(step.slots), TOGETHER):
            part = slice(begin, min(begin + TOGETHER, len(step.slots)))
            q, k, v = (x[part].transpose(0, 1)[None] for x in (queries, keys, values))
            if layer.rotation is not None:
                both = layer.rotation.rotate(torch.cat([q, k], 1), step.positions[None, part], inverse=True)
                q, k = torch.split(both.to(q.dtype), [q.shape[1], k.shape[1]], 1)
            found = self._heads.scores(layer.number, q, k, v)[0].T  # (n, Hkv)
            slots = step.slots[part]
            scores[slots // self._block, :, slots % self._block] = found
