"""The blended pass: some tokens of a prompt are computed, and the others come from a chunk store (Cache-Craft)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from millpond.cache.chunks.layered import LayeredVariant
from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.variant import ChunkVariant, ReadableVariant, variant_of
from millpond.cache.types import RotaryEmbedding
from millpond.engine.chunks.focus import Focus
from millpond.engine.chunks.loaded import LoadedChunks
from millpond.kernels.args import AttentionShape
from millpond.kernels.scattered_rows import attention_to_parts
from millpond.policy.reuse import filled_sums

#: Rotary embedding of the keys of each layer; None for a layer that does not turn them.
Rotations = list[RotaryEmbedding | None]


@dataclass(frozen=True, slots=True)
class ReusedChunk:
    """A chunk in a prompt, and the variant that its tokens come from.

    Attributes:
        begin: Index of its first token in the prompt.
        variant: The variant.
    """

    begin: int
    variant: ReadableVariant

    @property
    def end(self) -> int:
        return self.begin + self.variant.facts.n_tokens


@dataclass(slots=True)
class ComputedChunk:
    """A chunk that is computed for the store, in full or in part.

    Attributes:
        begin: Index of its first token.
        end: Index after its last token.
        chunk: Key of the chunk.
        prefix: Key of the tokens before it.
        exact: Whether nothing before it is approximate.
        before: Keys of the parts before it -> their tokens.
        parts: Part of each token of the prompt, (tokens of the prompt,) int64: its number in `before`, len(before) for
            the chunk itself, and one more for tokens of no part.
        sums: Attention of its computed tokens, summed over layers, (n, parts) float32.
        base: Variant that gives the tokens that are not computed; None: all are computed.
        computed: Whether each of its tokens is computed, (n,) bool; all True without a base.
        keys: Keys per layer, in pieces.
        values: Values per layer, in pieces.
        is_whole: Whether its computed tokens were computed in all layers, so that it may be kept.
    """

    begin: int
    end: int
    chunk: str
    prefix: str
    exact: bool
    before: dict[str, int]
    parts: Tensor
    sums: Tensor
    base: ReadableVariant | None = None
    computed: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.bool))
    keys: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)
    is_whole: bool = True

    def variant(self) -> ChunkVariant:
        """Return the variant that the store keeps, when all of the chunk was computed."""
        keys, values = ([torch.cat(pieces, 1) for pieces in part] for part in (self.keys, self.values))
        sums = self.sums / len(keys)
        if self.base is not None:
            sums = filled_sums(sums, self.computed, self.base.scores)
        return variant_of(self.chunk, self.prefix, self.exact, self.before, sums, keys, values)


@dataclass(slots=True)
class LayerWait:
    """Wait of one pass for layers of chunks that are still being read.

    Attributes:
        left_s: Seconds that the pass may still wait, for all of its prompts together.
    """

    left_s: float = 0.0

    def until_in(self, variant: LayeredVariant, layer: int) -> bool:
        """Return whether a layer is in, after a wait of at most `left_s`."""
        began = time.perf_counter()
        is_in = variant.wait_for(layer, self.left_s)
        self.left_s = max(0.0, self.left_s - (time.perf_counter() - began))
        return is_in


@dataclass(slots=True, eq=False)
class PromptBlend:
    """Choice of the tokens of one prompt that are computed, and the sources of the others.

    Attributes:
        computed: Whether each token is computed, (tokens,) bool.
        reused: Chunks with a variant.
        kept: Chunks that are computed for the store, in full or in part.
        exact: Whether all reused chunks are as a full computation would give them.
        rotations: Rotary embeddings of the layers.
        store: Store of the chunks, in which they stay until `release`.
        private: Whether what is stored is for the memory of this process alone.
        loaded: Chunks that were read for the prompt before it began.
        chunks: (begin, end) of all chunks of the prompt.
        wait: Wait of its pass for layers that are not in.
        lacks_layer: Whether a pass went on without one of its layers, so that its prompt must begin again.
    """

    computed: np.ndarray
    reused: list[ReusedChunk]
    kept: list[ComputedChunk]
    exact: bool
    rotations: Rotations
    store: ChunkStore
    private: bool = False
    loaded: LoadedChunks | None = None
    chunks: list[tuple[int, int]] = field(default_factory=list)
    wait: LayerWait = field(default_factory=LayerWait)
    lacks_layer: bool = False

    def __post_init__(self) -> None:
        for chunk in self.reused:
            self.store.pin(chunk.variant.facts)

    @property
    def n_reused(self) -> int:
        """Tokens that are not computed."""
        return int((~self.computed).sum())

    @property
    def n_recomputed(self) -> int:
        """Tokens of reused chunks that are computed."""
        return sum(int(self.computed[chunk.begin : chunk.end].sum()) for chunk in self.reused)

    @property
    def tainted(self) -> bool:
        """Whether some tokens come from the store, so that none of its pages counts as computed."""
        return not bool(self.computed.all())

    @property
    def is_loading(self) -> bool:
        """Whether layers of some chunks are still being read."""
        variants = [chunk.variant for chunk in self.reused]
        return any(isinstance(variant, LayeredVariant) and not variant.is_whole for variant in variants)

    def has_layer(self, variant: ReadableVariant, layer: int) -> bool:
        """Return whether a layer is in, after a bounded wait.

        After one was missing, no other is waited for.
        """
        if not self.lacks_layer and isinstance(variant, LayeredVariant):
            self.lacks_layer = not self.wait.until_in(variant, layer)
        return not self.lacks_layer

    def reach(self, begin: int, n: int) -> int:
        """Return how many tokens from `begin` a pass takes that computes at most n, at least one."""
        rows = np.flatnonzero(self.computed[begin:])
        return int(rows[n]) if n < len(rows) else len(self.computed) - begin

    def span(self, begin: int, end: int) -> BlendedSpan | None:
        """Return the tokens of a pass; None if all are computed and none is for the store."""
        kept = [chunk for chunk in self.kept if chunk.begin < end and begin < chunk.end]
        if bool(self.computed[begin:end].all()) and not kept:
            return None
        reused = [chunk for chunk in self.reused if chunk.begin < end and begin < chunk.end]
        rows = torch.from_numpy(np.flatnonzero(self.computed[begin:end]))
        focus = self._focus() if reused and end == len(self.computed) else None
        return BlendedSpan(begin, end - begin, rows, reused, kept, self, focus)

    def _focus(self) -> Focus | None:
        """Return the focus of the question; None if no tokens are left out."""
        if not self.store.focus or len(self.chunks) < 2:
            return None
        question = min(self.chunks[-1][1], len(self.computed) - 1)
        return Focus(self.chunks, question, self.store.focus, self.store.coverage)

    def finish(self) -> None:
        """Put the computed chunks into the store, after the prompt has been read."""
        for chunk in self.kept:
            if not chunk.is_whole:
                continue
            self.store.put(chunk.variant(), private=self.private, replaces=chunk.base is None)
        self.release()

    def release(self) -> None:
        """Release the chunks: no more of the prompt will be read. A second call does nothing."""
        for chunk in self.reused:
            self.store.unpin(chunk.variant.facts)
        self.kept, self.reused = [], []
        if self.loaded is not None:
            self.loaded.release()
            self.loaded = None


@dataclass(frozen=True, slots=True)
class BlendedSpan:
    """Tokens of one prompt in one pass: see `PartialSpan`.

    Attributes:
        begin: Position of the first.
        length: Number of tokens.
        rows: Indices of those that are computed, (R,).
        reused: Reused chunks that reach into the span.
        kept: Chunks that are computed for the store and reach into the span.
        blend: Choice that the span is a part of.
        focus: Focus of the prompt's question, if it is in the span and other chunks' tokens shall be left out.
    """

    begin: int
    length: int
    rows: Tensor
    reused: list[ReusedChunk]
    kept: list[ComputedChunk]
    blend: PromptBlend
    focus: Focus | None = None

    def complete(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Complete keys and values, see `PartialSpan.complete`; record those for the store.

        If a layer of a chunk is missing, the pass does not count for this prompt: zeros take its place, so that the
        other prompts of the pass go on.
        """
        keys, values = k.new_empty(len(k), self.length, k.shape[-1]), v.new_empty(len(v), self.length, v.shape[-1])
        rows = self.rows.to(k.device)
        if not all(self.blend.has_layer(chunk.variant, layer) for chunk in self.reused):
            keys.zero_(), values.zero_()
            keys[:, rows], values[:, rows] = k, v
            return keys, values
        for chunk in self.reused:
            begin, end = max(chunk.begin, self.begin), min(chunk.end, self.begin + self.length)
            in_chunk = slice(begin - chunk.begin, end - chunk.begin)
            in_span = slice(begin - self.begin, end - self.begin)
            keys[:, in_span] = self._turned(layer, chunk.variant.keys(layer)[:, in_chunk].to(k.device), begin).to(
                k.dtype
            )
            values[:, in_span] = chunk.variant.values(layer)[:, in_chunk].to(v.device, v.dtype)
        keys[:, rows], values[:, rows] = k, v
        for kept in self.kept:
            self._record(kept, layer, keys, values)
        return keys, values

    def observe(self, layer: int, q: Tensor, keys: Tensor, positions: Tensor, shape: AttentionShape) -> None:
        """Sum the attention of chunks that are computed for the store, see `PartialSpan.observe`."""
        rows = self.rows + self.begin
        if self.focus is not None:
            self.focus.observe(rows, q, keys, positions, shape)
        for kept in self.kept:
            chunk_rows = torch.nonzero((rows >= kept.begin) & (rows < kept.end)).flatten()
            if not len(chunk_rows):
                continue
            positions_of_rows = rows[chunk_rows]
            parts = kept.parts[positions[0].long().cpu()].to(q.device)  # all heads hold the same before a plan
            attention = attention_to_parts(
                q[:, chunk_rows.to(q.device)],
                keys,
                positions_of_rows.to(q.device, torch.int32),
                positions,
                shape,
                parts,
                kept.sums.shape[1],
            )
            kept.sums[positions_of_rows - kept.begin] += attention.cpu()

    def narrow(self, layer: int) -> tuple[BlendedSpan, Tensor] | None:
        """Leave out tokens of chunks that are not in focus, once the focus is stable.

        See `PartialSpan.narrow`. The first token of the prompt stays, since all tokens attend to it. In deeper
        layers the left-out tokens have the keys and values of their variants, so their chunk is not kept as a variant
        of its own.
        """
        if self.focus is None or not self.focus.is_stable:
            return None
        rows = self.rows + self.begin
        out = torch.zeros(len(rows), dtype=torch.bool)
        for chunk in self.reused:
            if self.focus.leaves_out(chunk.begin):
                out |= (rows >= max(chunk.begin, 1)) & (rows < min(chunk.end, self.focus.question))
        kept = []
        for part in self.kept:
            part.is_whole &= not bool((out & (rows >= part.begin) & (rows < part.end)).any())
            kept += [part] if part.is_whole else []
        self.blend.store.left_out(int(out.sum()) * (len(self.blend.rotations) - 1 - layer))
        stay = torch.nonzero(~out).flatten()
        return replace(self, rows=self.rows[stay], kept=kept, focus=None), stay

    def _turned(self, layer: int, keys: Tensor, begin: int, inverse: bool = False) -> Tensor:
        """Return keys (Hkv, n, key_dim) turned to the positions from `begin` on, or back.

        In float32 or wider.
        """
        rotary = self.blend.rotations[layer]
        if rotary is None:
            return keys
        positions = torch.arange(begin, begin + keys.shape[1], device=keys.device)
        return rotary.rotate(keys[None], positions[None], inverse=inverse)[0]

    def _record(self, kept: ComputedChunk, layer: int, keys: Tensor, values: Tensor) -> None:
        """Record a chunk's part of a span, keys before RoPE."""
        begin, end = max(kept.begin, self.begin), min(kept.end, self.begin + self.length)
        in_span = slice(begin - self.begin, end - self.begin)
        if layer == len(kept.keys):
            kept.keys.append([])
            kept.values.append([])
        new_keys = self._turned(layer, keys[:, in_span], begin, inverse=True).to(keys.dtype).cpu()
        new_values = values[:, in_span].cpu().clone()
        if kept.base is not None:
            in_chunk = slice(begin - kept.begin, end - kept.begin)
            computed = kept.computed[in_chunk, None]
            new_keys = torch.where(computed, new_keys, kept.base.keys(layer)[:, in_chunk].to(keys.dtype))
        kept.keys[layer].append(new_keys)
        kept.values[layer].append(new_values)
