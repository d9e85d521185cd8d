"""Memory of one step besides weights and KV: activations of its rows, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millpond.engine.offload.model_size import ModelSize
from millpond.engine.scheduler import MOST_PIECES, READING_SHARE

#: Pages hold positions and scores besides keys and values, and are not full: more bytes than the entries alone.
_BESIDE_KV = 1.5


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Most bytes that a step takes, computed from the shapes of the layers.

    Attributes:
        by_purpose: "activations" and "logits". token_bytes: of a token's keys and values in all layers.
    """

    by_purpose: Mapping[str, int]
    token_bytes: int

    @classmethod
    def of(cls, model: ModelSize, *, step_tokens: int, running: int, micro_batch: int | None = None) -> StepMemory:
        """
        A step has at most `step_tokens` rows, or all that decode and a few of prompts. Activations are those of the
        feed-forward, which `LayerSize.row_bytes` counts, and the blocks of weights that are widened.

        Args:
            step_tokens: tokens of a step while prompts are read. running: sequences that decode. micro_batch: those of
                them that pass a layer at a time; None: all.
        """
        some = max(step_tokens // READING_SHARE, 1)
        passing = max(step_tokens, min(running, micro_batch or running) + some)
        rows, item = max(step_tokens, running + some), model.dtype.itemsize
        activations = passing * max(layer.row_bytes for layer in model.layers) + model.widening_bytes
        logits = min(running + MOST_PIECES, rows) * model.vocabulary * (item + 4)
        kv = sum(shape.n_kv_heads * (shape.key_dim + shape.value_dim) for shape in model.shapes)
        return cls({"activations": activations, "logits": logits}, kv * item)

    @property
    def nbytes(self) -> int:
        """Of all purposes."""
        return sum(self.by_purpose.values())

    def kv_bytes(self, n_tokens: int) -> int:
        """Bytes of the pages of a sequence of `n_tokens` tokens, none evicted."""
        return int(n_tokens * self.token_bytes * _BESIDE_KV)
