"""The blended pass: some tokens of a prompt are computed, and the others come from a chunk store (Cache-Craft)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.variant import ChunkVariant, StoredVariant, variant_of
from millpond.cache.types import RotaryEmbedding
from millpond.engine.chunks.loaded import LoadedChunks
from millpond.kernels.args import AttentionShape
from millpond.kernels.scattered_rows import attention_to_parts

#: How each layer turns its keys; None for a layer that does not.
Rotations = list[RotaryEmbedding | None]


@dataclass(frozen=True, slots=True)
class ReusedChunk:
    """A chunk that stands at `begin` of a prompt, and the variant that its tokens come from."""

    begin: int
    variant: StoredVariant

    @property
    def end(self) -> int:
        return self.begin + self.variant.facts.n_tokens


@dataclass(slots=True)
class ComputedChunk:
    """A chunk that is computed in full, for the store.

    Attributes:
        begin, end: its tokens. chunk, prefix: keys. exact: nothing before it is approximate.
        before: keys of the parts before it -> their tokens. parts: (tokens of the prompt,) int64, the part of each: its
            number in `before`, len(before) for the chunk itself, and one more for tokens that count for none.
        sums: (n, parts) float32, the attention of its tokens, summed over layers. keys, values: per layer, in pieces.
    """

    begin: int
    end: int
    chunk: str
    prefix: str
    exact: bool
    before: dict[str, int]
    parts: Tensor
    sums: Tensor
    keys: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)

    def variant(self) -> ChunkVariant:
        """What the store keeps, when all of the chunk was computed."""
        keys, values = ([torch.cat(pieces, 1) for pieces in part] for part in (self.keys, self.values))
        return variant_of(self.chunk, self.prefix, self.exact, self.before, self.sums / len(keys), keys, values)


@dataclass(slots=True, eq=False)
class PromptBlend:
    """What is computed of one prompt, and where the rest comes from.

    Attributes:
        computed: (tokens,) bool. reused: chunks with a variant. kept: chunks that are computed for the store.
        exact: all reused chunks are as a full computation would give them. store: that they are of, in which they stay
            until `release`. private: what is stored is for the memory of this process alone.
        loaded: what was read for the prompt before it began.
    """

    computed: np.ndarray
    reused: list[ReusedChunk]
    kept: list[ComputedChunk]
    exact: bool
    rotations: Rotations
    store: ChunkStore
    private: bool = False
    loaded: LoadedChunks | None = None

    def __post_init__(self) -> None:
        for one in self.reused:
            self.store.pin(one.variant.facts)

    @property
    def n_reused(self) -> int:
        """Tokens that are not computed."""
        return int((~self.computed).sum())

    @property
    def n_recomputed(self) -> int:
        """Tokens of reused chunks that are computed."""
        return sum(int(self.computed[one.begin : one.end].sum()) for one in self.reused)

    @property
    def tainted(self) -> bool:
        """Whether something comes from the store, so that none of the prompt's pages may pass for computed ones."""
        return not bool(self.computed.all())

    def reach(self, begin: int, n: int) -> int:
        """How many tokens from `begin` a pass takes in that computes at most n, at least one of them."""
        rows = np.flatnonzero(self.computed[begin:])
        return int(rows[n]) if n < len(rows) else len(self.computed) - begin

    def span(self, begin: int, end: int) -> BlendedSpan | None:
        """The tokens of a pass; None where all are computed and none is for the store."""
        kept = [one for one in self.kept if one.begin < end and begin < one.end]
        if bool(self.computed[begin:end].all()) and not kept:
            return None
        reused = [one for one in self.reused if one.begin < end and begin < one.end]
        rows = torch.from_numpy(np.flatnonzero(self.computed[begin:end]))
        return BlendedSpan(begin, end - begin, rows, reused, kept, self.rotations)

    def finish(self) -> None:
        """The prompt is read: give the store what was computed for it."""
        for one in self.kept:
            self.store.put(one.variant(), private=self.private)
        self.release()

    def release(self) -> None:
        """No more of the prompt will be read; a second call does nothing."""
        for one in self.reused:
            self.store.unpin(one.variant.facts)
        self.kept, self.reused = [], []
        if self.loaded is not None:
            self.loaded.release()
            self.loaded = None


@dataclass(frozen=True, slots=True)
class BlendedSpan:
    """The tokens of one prompt in one pass: see `PartialSpan`.

    Attributes:
        begin: position of the first. reused, kept: chunks that reach into the span.
    """

    begin: int
    length: int
    rows: Tensor
    reused: list[ReusedChunk]
    kept: list[ComputedChunk]
    rotations: Rotations

    def complete(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `PartialSpan.complete`; what is computed for the store is noted."""
        keys, values = k.new_empty(len(k), self.length, k.shape[-1]), v.new_empty(len(v), self.length, v.shape[-1])
        for one in self.reused:
            begin, end = max(one.begin, self.begin), min(one.end, self.begin + self.length)
            own = slice(begin - one.begin, end - one.begin)
            there = slice(begin - self.begin, end - self.begin)
            keys[:, there] = self._turned(layer, one.variant.keys(layer)[:, own].to(k.device), begin).to(k.dtype)
            values[:, there] = one.variant.values(layer)[:, own].to(v.device, v.dtype)
        rows = self.rows.to(k.device)
        keys[:, rows], values[:, rows] = k, v
        for kept in self.kept:
            self._note(kept, layer, keys, values)
        return keys, values

    def observe(self, layer: int, q: Tensor, keys: Tensor, positions: Tensor, shape: AttentionShape) -> None:
        """See `PartialSpan.observe`: sums the attention of chunks that are computed for the store."""
        rows = self.rows + self.begin
        for kept in self.kept:
            own = torch.nonzero((rows >= kept.begin) & (rows < kept.end)).flatten()
            places = rows[own]
            parts = kept.parts[positions[0].long().cpu()].to(q.device)  # all heads hold the same before a plan
            found = attention_to_parts(
                q[:, own.to(q.device)],
                keys,
                places.to(q.device, torch.int32),
                positions,
                shape,
                parts,
                kept.sums.shape[1],
            )
            kept.sums[places - kept.begin] += found.cpu()

    def _turned(self, layer: int, keys: Tensor, begin: int, inverse: bool = False) -> Tensor:
        """Keys (Hkv, n, key_dim) turned to the positions from `begin` on, or back, in float32 or wider."""
        rotary = self.rotations[layer]
        if rotary is None:
            return keys
        places = torch.arange(begin, begin + keys.shape[1], device=keys.device)
        return rotary.rotate(keys[None], places[None], inverse=inverse)[0]

    def _note(self, kept: ComputedChunk, layer: int, keys: Tensor, values: Tensor) -> None:
        """Note a chunk's part of a span, keys before RoPE."""
        begin, end = max(kept.begin, self.begin), min(kept.end, self.begin + self.length)
        there = slice(begin - self.begin, end - self.begin)
        if layer == len(kept.keys):
            kept.keys.append([])
            kept.values.append([])
        kept.keys[layer].append(self._turned(layer, keys[:, there], begin, inverse=True).to(keys.dtype).cpu())
        kept.values[layer].append(values[:, there].cpu().clone())
