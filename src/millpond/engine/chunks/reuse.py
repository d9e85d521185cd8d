"""Reuse of stored chunks in the prompts of an engine: the variant of each, the tokens computed again, and its files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.tiers import ChunkUse
from millpond.cache.chunks.variant import ReadableVariant, StoredShape, ids_key, salted
from millpond.cache.types import RotaryEmbedding
from millpond.codec.transform.transform_file import ModelTransform
from millpond.engine.chunks.blend import ComputedChunk, PromptBlend, ReusedChunk, Rotations
from millpond.engine.chunks.loaded import ChunkSource, LoadedChunks, LoadingSource, StoreSource
from millpond.engine.chunks.prompt import PromptSpan
from millpond.engine.file_loader import LoadOrder
from millpond.engine.request import CacheOptions
from millpond.engine.request_state import RequestState
from millpond.engine.sharing import can_share
from millpond.errors import OptionError, UnsupportedModelError
from millpond.hf.document import fingerprint
from millpond.hf.model_profile import ModelProfile
from millpond.hf.signals.rotary import layer_rotations
from millpond.policy.reuse import Pick, Recompute, pick_tokens
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import PackedModel

#: Weight of a new pass in the mean of the seconds that a token takes.
_NEW_SHARE = 0.25
#: deviation(begin, variant) -> (n,): distance of the keys of a chunk from those of this prompt.
Deviation = Callable[[int, ReadableVariant], Tensor]


def model_mark(model: Any, weights: str | None) -> str:
    """Return the mark of a model and the format of its weights.

    It must be made before the weights are packed.
    """
    return hashlib.sha256(f"{fingerprint(model)} {model.dtype} {weights}".encode()).hexdigest()


class ChunkReuse:
    """A chunk store with the model that it belongs to.

    Args:
        store: The store.
        model: The model.
        mark: Mark of the model, see `model_mark`.
        max_rows: Most tokens of a pass.
        transform: Its transform, for a store in a storage codec; None: there is none.

    Attributes:
        row_s: Seconds that a pass took for each token lately; 0: none was measured.

    Raises:
        UnsupportedModelError: keys of this model cannot be moved; the message says why.
        OptionError: the store is another model's, or its storage codec has no transform.
    """

    def __init__(
        self,
        store: ChunkStore,
        model: PackedModel,
        mark: str,
        max_rows: int = 1 << 20,
        transform: ModelTransform | None = None,
    ) -> None:
        self.store, self._model, self.max_rows = store, model, max_rows
        self.row_s = 0.0
        if store.focus and model.runner != "lean":
            raise UnsupportedModelError(
                f"focus={store.focus} leaves tokens out of deeper layers, which takes a model that runs without its "
                "modules; leave focus out"
            )
        self._rotations = _rotations(model)
        layers = tuple((layer.n_kv_heads, layer.key_dim, layer.value_dim) for layer in model.layers)
        store.bind(StoredShape(mark, model.dtype, layers), transform)

    def check(
        self,
        cache_factory: CacheFactory,
        method: str,
        spans: Sequence[PromptSpan],
        options: CacheOptions,
        logprobs: bool,
    ) -> bool:
        """Return whether a request takes chunks from the store or gives some to it.

        False: its prompt runs as any other.

        Args:
            cache_factory: Factory of its cache.
            method: Name of the method of `cache_factory`.
            spans: Parts of the prompt.
            options: Options of its cache.
            logprobs: Whether the log probabilities of the prompt are requested.

        Raises:
            OptionError: a method that needs all queries of a prompt, and some would not be computed; or a chunk that
                no tier can hold.
        """
        for span in spans:
            if span.is_chunk:
                self.store.check_size(span.end - span.begin)
        needs_all_tokens = (
            cache_factory.policy.scores_entries or cache_factory.policy.sums_prompt or not can_share(cache_factory)
        )
        if options.recompute == 1:
            return not needs_all_tokens and not logprobs
        if needs_all_tokens:
            raise OptionError(
                f"method {method!r} needs every query or hidden state of a prompt, and "
                "tokens that come from a chunk store have none; give recompute=1, or a method such as 'full', 'snapkv' "
                "or 'keydiff'"
            )
        if logprobs:
            raise OptionError("prompt_logprobs need every token of the prompt to be computed; give recompute=1")
        if options.pick == "deviation":
            self._model.check_second_layer()
        return True

    def begin(
        self,
        ids: np.ndarray,
        spans: Sequence[PromptSpan],
        options: CacheOptions,
        window: int,
        salt: str | None,
        loaded: LoadedChunks | None = None,
    ) -> PromptBlend:
        """Choose a variant of each chunk of a prompt, and the tokens that are computed.

        The first token of a prompt is computed, unless it comes from a chunk that was stored at a beginning: most
        models let all tokens attend to it, whatever it is, and one from the middle of another text does not serve.

        Args:
            ids: Tokens of the prompt, (n,) int64.
            spans: Parts of the prompt.
            options: Options of its cache.
            window: Last tokens whose queries the method needs.
            salt: Salt of the request. It takes chunks that were stored without a salt or with its own; those that it
                gives are for its own salt alone, in memory.
            loaded: Variants that `load` read; besides these only memory is searched. None: files are read here.
        """
        computed = np.ones(len(ids), dtype=bool)
        reused: list[ReusedChunk] = []
        kept: list[ComputedChunk] = []
        before: dict[str, int] = {}
        exact = True
        deviation = _Deviation(self._model, self._rotations, ids) if options.pick == "deviation" else None
        source: ChunkSource = StoreSource(self.store) if loaded is None else loaded
        for span, choice in self._choices(ids, spans, options, salt, source):
            if choice is not None:
                keep = choice.keep and all(chunk.chunk != choice.key for chunk in kept)
                if choice.variant is None:
                    if keep:
                        kept.append(_to_keep(ids, span, choice.key, choice.prefix, exact, before, spans))
                else:
                    exact = exact and choice.same and self.store.exact
                    if keep:
                        kept.append(
                            _to_keep(ids, span, choice.key, choice.prefix, False, before, spans, choice.variant)
                        )
                    picked = _picked(options.pick, choice.variant, span.begin, choice.share, choice.prefix, deviation)
                    computed[span.begin : span.end] = False
                    computed[span.begin + picked.numpy()] = True
                    reused.append(ReusedChunk(span.begin, choice.variant))
            before[ids_key(ids[span.begin : span.end])] = span.end - span.begin
        if reused and not (reused[0].begin == 0 and reused[0].variant.facts.prefix == ids_key(())):
            computed[0] = True
        computed[len(ids) - max(1, window) :] = True
        for chunk in kept:
            chunk.computed = torch.from_numpy(computed[chunk.begin : chunk.end].copy())
        return PromptBlend(
            computed,
            reused,
            kept,
            exact,
            self._rotations,
            self.store,
            private=salt is not None,
            loaded=loaded,
            chunks=[(span.begin, span.end) for span in spans if span.is_chunk],
        )

    def load(
        self,
        ids: np.ndarray,
        spans: Sequence[PromptSpan],
        options: CacheOptions,
        salt: str | None,
        loaded: LoadedChunks,
        is_wanted: Callable[[], bool],
    ) -> None:
        """Read the variants that `begin` would choose now, from any thread.

        The prompt may begin before all of their layers are in, see `LoadingSource.read_layers`.

        Args:
            ids: Tokens of the prompt, (n,) int64.
            spans: Parts of the prompt.
            options: Options of its cache.
            salt: Salt of the request.
            loaded: Filled with the variants.
            is_wanted: Whether to continue, called after each chunk.
        """
        source = LoadingSource(self.store, loaded)
        n_computed = len(ids)
        try:
            for span, choice in self._choices(ids, spans, options, salt, source):
                if choice is not None and choice.variant is not None:
                    n_computed -= int((1 - choice.share) * (span.end - span.begin))
                if not is_wanted():
                    return
            n_layers = len(self._model.layers)
            compute_s = self.row_s * min(n_computed, self.max_rows) / n_layers
            n_first = 2 if options.pick == "deviation" else 1  # whose keys the choice of the tokens takes
            source.read_layers(n_layers, compute_s, is_wanted, n_first)
        finally:
            source.close()

    def passed(self, n_rows: int, seconds: float) -> None:
        """Record how long a pass took that waited for no layer of a chunk."""
        took = seconds / max(n_rows, 1)
        self.row_s = took if not self.row_s else self.row_s + _NEW_SHARE * (took - self.row_s)

    def _choices(
        self, ids: np.ndarray, spans: Sequence[PromptSpan], options: CacheOptions, salt: str | None, source: ChunkSource
    ) -> Iterator[tuple[PromptSpan, _Choice | None]]:
        """Yield the parts of a prompt, and of each chunk the variant that it takes."""
        before: dict[str, None] = {}
        n_chunks = sum(span.is_chunk for span in spans)
        depth = 0
        for span in spans:
            key = ids_key(ids[span.begin : span.end])
            choice = None
            if span.is_chunk:
                own = key if salt is None else salted(key, salt)
                use = ChunkUse(source.request, depth, n_chunks)
                prefix = ids_key(ids[: span.begin])
                choice = self._choose(own, {key, own}, prefix, list(before), options.recompute, source, use)
                depth += 1
            before[key] = None
            yield span, choice

    def _choose(
        self,
        own: str,
        keys: set[str],
        prefix: str,
        before: list[str],
        recompute: Recompute,
        source: ChunkSource,
        use: ChunkUse,
    ) -> _Choice:
        """Return the variant with the least CFO under some keys."""
        variants = [facts for key in sorted(keys) for facts in source.find(key)]
        if recompute == 1 and variants:
            return _Choice(own, prefix, None, keep=False)
        for facts in sorted(variants, key=lambda facts_: facts_.share(prefix, before, self.store.alpha)):
            same = facts.exact and facts.prefix == prefix
            share = facts.share(prefix, before, self.store.alpha)
            share = share if recompute == "auto" or same else float(recompute)
            if share >= 1:
                return _Choice(own, prefix, None, keep=True)
            variant = source.take(facts, share, use)
            if variant is not None:
                n_own, is_private = sum(other.chunk == own for other in variants), len(keys) > 1
                keep = recompute == "auto" and self.store.takes_further(
                    share, n_own, variant.facts.n_tokens, private=is_private
                )
                return _Choice(own, prefix, variant, share, same, keep)
        source.missed()
        return _Choice(own, prefix, None, keep=True)


class _Choice(NamedTuple):
    """Choice for a chunk.

    Attributes:
        key: Key under which this request stores it.
        prefix: Key of all ids before it.
        variant: Variant that it takes; None: it is computed.
        share: Share of its tokens that is computed again.
        same: Whether the variant was computed in just this context, in full.
        keep: Whether the store shall have what is computed, in full or in part.
    """

    key: str
    prefix: str
    variant: ReadableVariant | None
    share: float = 1.0
    same: bool = False
    keep: bool = False


def _to_keep(
    ids: np.ndarray,
    span: PromptSpan,
    key: str,
    prefix: str,
    exact: bool,
    before: dict[str, int],
    spans: Sequence[PromptSpan],
    base: ReadableVariant | None = None,
) -> ComputedChunk:
    """Return a chunk that is computed for the store.

    With a base it is computed in part, and the rest comes from there. The first token of a prompt counts for no part:
    most tokens attend to it, whatever it is.
    """
    numbers = {part: number for number, part in enumerate(before)}
    parts = torch.full((len(ids),), len(before) + 1)
    for earlier in spans:
        if earlier.end <= span.begin:
            parts[earlier.begin : earlier.end] = numbers[ids_key(ids[earlier.begin : earlier.end])]
    parts[span.begin : span.end] = len(before)
    if span.begin:
        parts[0] = len(before) + 1
    sums = torch.zeros(span.end - span.begin, len(before) + 1)
    return ComputedChunk(span.begin, span.end, key, prefix, exact, dict(before), parts, sums, base)


def _picked(
    pick: Pick, variant: ReadableVariant, begin: int, share: float, prefix: str, deviation: Deviation | None
) -> Tensor:
    """Return the tokens of a chunk that are computed again, (n,) int64."""
    n = variant.facts.n_tokens
    if not share:
        return torch.zeros(0, dtype=torch.int64)
    scores = variant.scores if deviation is None else deviation(begin, variant)
    return pick_tokens(pick, scores, n, share, seed=int(prefix[:12], 16))


class _Deviation:
    """Deviation of the keys of layer 1 from cached ones (CacheBlend).

    Layer 0 has computed all tokens before.

    Args:
        model: The model.
        rotations: Rotary embeddings of the layers.
        ids: Tokens of the prompt, (n,).
    """

    def __init__(self, model: PackedModel, rotations: Rotations, ids: np.ndarray) -> None:
        self._rotary = rotations[1]
        self._keys = model.keys_of_second_layer(torch.from_numpy(ids).to(model.device))  # (Hkv, n, key_dim)

    def __call__(self, begin: int, variant: ReadableVariant) -> Tensor:
        old = variant.keys(1).to(self._keys.device)
        positions = torch.arange(begin, begin + old.shape[1], device=old.device)
        if self._rotary is not None:
            old = self._rotary.rotate(old[None], positions[None])[0]
        new = self._keys[:, begin : begin + old.shape[1]]
        return (new.float() - old.float()).square().sum((0, 2)).cpu()


def _rotations(model: PackedModel) -> list[RotaryEmbedding | None]:
    """Return the rotary embeddings of the layers' keys; None for a layer without one.

    Raises:
        UnsupportedModelError: its keys cannot be moved.
    """
    profile = ModelProfile.of(model.model)
    why = None
    if model.states is not None:
        why = "has layers with recurrent states, which sum up all tokens before"
    elif any(model.readers.values()):
        why = "has layers that read the keys of others"
    elif profile.rotary is None:
        why = "has no rotary position embedding: its positions are part of what each layer reads"
    if why is not None:
        raise UnsupportedModelError(f"{profile.name} {why}, so cached chunks cannot be moved; leave chunk_store out")
    return list(layer_rotations(profile))


class ChunkLoadSource:
    """Chunks that requests wait for, see `LoadSource`.

    More requests ahead would find fewer of the chunks that those before them store.

    Args:
        reuse: The chunk store with its model.
    """

    name = "millpond-chunks"
    ahead = 4

    def __init__(self, reuse: ChunkReuse) -> None:
        self._reuse, self.limit, self.patience_s = reuse, reuse.store.loading, reuse.store.load_timeout_s

    def wants(self, state: RequestState) -> bool:
        """Return whether a prompt has chunks."""
        return bool(state.spans)

    def empty(self) -> LoadedChunks:
        """Return an empty holder, see `LoadSource`."""
        return LoadedChunks(self._reuse.store)

    def order(self, state: RequestState) -> LoadOrder[LoadedChunks]:
        """Return the order for a request, see `LoadSource`."""
        request, store = state.request, self._reuse.store

        def size() -> int:
            return sum(store.size_of(span.end - span.begin) for span in state.spans if span.is_chunk)

        def load(loaded: LoadedChunks, is_wanted: Callable[[], bool]) -> None:
            self._reuse.load(state.ids_array, state.spans, request.cache, request.cache_salt, loaded, is_wanted)

        return LoadOrder(size, load)

    def failed(self) -> None:
        """Record a failed load, see `LoadSource`."""
        self._reuse.store.load_failed()

    def gave_up(self) -> None:
        """Record a request whose chunks are computed, see `LoadSource`."""
        self._reuse.store.load_timed_out()

    def disk_hangs(self, hangs: bool) -> None:
        """Let the store leave its files alone, see `LoadSource`."""
        self._reuse.store.files_hang = hangs
