"""Memory of one step besides weights and KV: activations of its rows, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millpond.engine.config import EngineConfig
from millpond.engine.scheduler import MOST_PIECES, READING_SHARE
from millpond.kernels.many_rows import BLOCK
from millpond.models.lean.fuse import fusable
from millpond.models.lean.layers import block_of
from millpond.models.weights.skeleton import Skeleton

#: Pages hold positions and scores besides keys and values, and are not full: more bytes than the entries alone.
_BESIDE_KV = 1.5


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Most bytes that a step takes, computed from the shapes of a layer.

    Attributes:
        by_purpose: "activations" and "logits". token_bytes: of a token's keys and values in all layers.
    """

    by_purpose: Mapping[str, int]
    token_bytes: int

    @classmethod
    def of(cls, skeleton: Skeleton, config: EngineConfig) -> StepMemory:
        """
        Activations are those of the feed-forward: the residual and its copies, the results of gate and up, their
        product, and rows and a block of weights in float32 where 16-bit numbers are widened.
        """
        block, size = block_of(skeleton.layers[0], fusable), skeleton.dtype.itemsize
        widths = [len(weight) for weight, _ in block.qkv.parts]
        up = sum(len(weight) for weight, _ in block.up.parts)
        ((down, _),) = block.down.parts
        width, inner = down.shape
        rows = max(config.max_step_tokens, config.max_running + max(config.max_step_tokens // READING_SHARE, 1))
        activations = rows * (size * (3 * width + max(sum(widths), 2 * up + inner)) + 4 * max(width, inner))
        if size < 4:
            activations += 2 * 4 * BLOCK
        logits = min(config.max_running + MOST_PIECES, rows) * skeleton.model.config.vocab_size * (size + 4)
        kv = sum(widths[1:]) if len(widths) == 3 else 2 * widths[0] // 3
        return cls({"activations": activations, "logits": logits}, kv * size * len(skeleton.layers))

    @property
    def nbytes(self) -> int:
        """Of all purposes."""
        return sum(self.by_purpose.values())

    def kv_bytes(self, n_tokens: int) -> int:
        """Bytes of the pages of a sequence of `n_tokens` tokens, none evicted."""
        return int(n_tokens * self.token_bytes * _BESIDE_KV)
