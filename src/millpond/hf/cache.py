"""Transformers cache with a budget, which `compress` returns."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from millpond.budget import Budget
from millpond.cache.layer.draft_rollback import DraftRollback
from millpond.cache.layer.joint_plans import run_plans
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.pool_set import LayerPools
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.cache.state.positions import PositionTracker
from millpond.cache.state.token_ids import TokenIds
from millpond.cache.types import RotaryEmbedding
from millpond.codec.spec import Codec
from millpond.errors import CacheMismatchError, NotPicklableError, UnsupportedModelError
from millpond.hf.forget import drop_spans
from millpond.hf.fork import check_pages, share
from millpond.hf.forward_hooks import ForwardHooks
from millpond.hf.generation import UnusedCacheWarning, enter, leave
from millpond.hf.grad_mode import no_autograd
from millpond.hf.image_tokens import ImageTokens, image_tokens
from millpond.hf.layer import MillpondLayer, Observer, make_layer_cache
from millpond.hf.layer_budgets import LayerBudgets, entries_of
from millpond.hf.model_profile import ModelProfile
from millpond.hf.prompt_parts import PromptParts
from millpond.hf.protected_spans import protect_spans
from millpond.hf.signals.reconstruction import PromptReconstruction
from millpond.hf.signals.rotary import attach_rotations
from millpond.hf.signals.token_entropy import TokenEntropyHook
from millpond.hf.state_layers import build_layers
from millpond.hf.stats import CacheStats, measure
from millpond.hf.tokens_read import TextRead
from millpond.kernels.cuda_graphs import RecordedDecode, record_cuda, recording
from millpond.policy.policy import Policy
from millpond.tiers.free_memory import give_back


class MillpondCache(Cache):
    """KV cache inside a budget, made by `millpond.compress`.

    Pass it as `cache`, or as `past_key_values`. Safe for one batch of prompts and their later turns; `reset` before an
    unrelated prompt. Inside its `with` block `generate` of the model uses it, a new prompt at each call, if no other
    cache is passed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        profile: ModelProfile,
        policy: Policy,
        budget: Budget | None,
        *,
        pools: LayerPools,
        between_chunks: bool = True,
        rotary: RotaryEmbedding | None = None,
        croppable: bool = False,
    ) -> None:
        budgets = LayerBudgets(budget, policy, profile.windows)
        self.policy = policy
        self._budgets = budgets
        self.settings: dict[str, Any] | None = None  # the arguments of `compress`, where a method's name was given
        self.model = weakref.ref(model)
        self.dtype: torch.dtype = model.dtype
        self.attaches = False  # whether `generate` uses it inside a `with` block, as `compress` sets it
        self.text = TextRead()
        self.filled_inside = False  # whether what it holds was read by `generate` inside its `with` block
        self._used = self._closed = False
        self._stats_at_close: CacheStats | None = None
        self.tracker = PositionTracker()
        self._image_ids = profile.image_ids
        needs = policy.needs
        if needs.token_ids or self._image_ids:
            self.tracker.tokens = TokenIds(required=needs.token_ids)
        repeat = needs.prompt_repeat
        self.rebuilder = None if repeat is None else PromptReconstruction(profile, model.device, repeat)
        self._between_chunks = between_chunks
        self._croppable = croppable
        self.draft_rollback = DraftRollback(self.tracker, truncatable=croppable)
        self._pools = pools
        self.kin: weakref.WeakSet[MillpondCache] = weakref.WeakSet([self])  # that share the pools
        self.make_another: Callable[[PreTrainedModel], MillpondCache] | None = None  # of this kind, in these pools
        self._finalizers: list[weakref.finalize[[], MillpondCache]] = []
        self._before_pass = 0
        self.passes = ForwardHooks(self, profile.modules)
        self.on_close(self.passes.close)
        self.entropies: TokenEntropyHook | None = None
        if needs.entropies is not None:
            self.entropies = TokenEntropyHook(self, model, needs.entropies, between_chunks=between_chunks)
            self.on_close(self.entropies.close)
        make = make_layer_cache(profile.latent)
        layer_caches = [
            make(
                index,
                policy,
                partial(entries_of, budgets, policy, self.tracker, index),
                pool_set.plain,
                self.tracker,
                between_chunks=between_chunks and not (policy.needs_all_layers or self.rebuilder),
                rotary=rotary,
                quantized=pool_set.make_quantized,
                reading=pool_set.reading,
            )
            for index, pool_set in enumerate(pools.by_layer(profile.n_layers))
        ]
        budgets.layer_caches = layer_caches
        stays = policy.keeps_all and pools.format is None
        self.parts = PromptParts(policy, layer_caches, stays=stays, limited=pools.limited)
        budgets.at_prompt_end = self.parts.expected
        attach_rotations(profile, layer_caches)
        if model.device.type == "cuda" and recording():
            for layer_cache in layer_caches:
                layer_cache.attention.recorded = RecordedDecode(record_cuda)
        self.shared_layers = profile.shared
        layers, self.states = build_layers(profile, layer_caches, self.draft_rollback, self.passes)
        super().__init__(layers=layers)

    # ------------------------------------------------------------------ for users

    @property
    def layer_caches(self) -> list[LayerCache]:
        """Caches of the attention layers."""
        return list(self.entry_layers.values())

    @property
    def entry_layers(self) -> dict[int, LayerCache]:
        """Caches of the attention layers by the number of the layer in the model.

        A hybrid has other layers too.
        """
        return {layer.index: layer.layer_cache for layer in self.layers if isinstance(layer, MillpondLayer)}

    @property
    def budget(self) -> Budget | None:
        """Budget of all sequences of the cache together; None for no limit.

        A new budget takes effect with the next plan.
        """
        return self._budgets.budget

    @budget.setter
    def budget(self, budget: Budget | None) -> None:
        self._budgets.budget = budget

    @property
    def pools(self) -> list[RefCountedPool[Any]]:
        """Page pools, one per shape and format of entry."""
        return list(self._pools)

    @property
    def codecs(self) -> list[Codec]:
        """Formats of entries that are not stored as the model computes them."""
        return self._pools.codecs

    def stats(self) -> CacheStats:
        """Return the counts and bytes of the cache in its current state.

        Those of a closed cache, as behind its `with` block, are what they were when it was closed.
        """
        return self._stats_at_close or measure(self)

    def positions(self, layer: int, sequence: int = 0) -> list[list[int]]:
        """Return the kept positions per KV head, ascending.

        Positions count the sequence's own tokens, without pads.

        Args:
            layer: Number of the layer in the model.
            sequence: Sequence in the batch.

        Raises:
            CacheMismatchError: there is no such layer or sequence, or the layer holds no entries: it has a state, or
                reads those of another layer (`stats().shared_layers`).
        """
        layer_cache = self.entry_layers.get(layer)
        if layer_cache is None:
            has_others = self.states.layers or self.shared_layers
            note = f", of which {', '.join(map(str, self.entry_layers))} hold entries" if has_others else ""
            raise CacheMismatchError(f"layer {layer}: the model has layers 0 to {len(self.layers) - 1}{note}")
        if not 0 <= sequence < max(self.tracker.n_seq, 1):
            raise CacheMismatchError(f"sequence {sequence}: the cache holds {self.tracker.n_seq}")
        rows = layer_cache.read(sequence).positions
        return [[int(p) for p in row if p >= 0] for row in rows.tolist()]

    def image_tokens(self) -> ImageTokens:
        """Return how many tokens of images and videos were seen, and how many are kept.

        Raises:
            UnsupportedModelError: the model has no image tokens.
            CacheMismatchError: it was given embeddings in place of ids.
        """
        return image_tokens(self, self._image_ids)

    def protect(
        self, spans: Sequence[Sequence[int]], *, share: float | None = None, sequence: int | None = None
    ) -> None:
        """Keep spans of a text, or a share of each, in every head of every layer, until `reset`.

        They are kept whatever the method is, and count in the budget. With a `share`, a span of n of the text's P
        tokens keeps at least floor(n * share * B / P) of the B entries of each head, its best by the method's score, if
        what the method protects leaves room (`millpond.policy.fair_shares`): pass every message of a chat as a span,
        and no long one is lost whole.

        Before a prompt they are spans of that prompt, in place of those that were given before. Later they are added,
        and must be in tokens that are still to be read. Spans that stay whole and spans with a share are counted apart.

        Args:
            spans: [begin, end) in tokens of the sequence's own text, without pads; empty before a prompt to keep none.
            share: Share of an even cut of the budget, above 0 and at most 1; None to keep the spans whole.
            sequence: Sequence of the batch that they are spans of; None for each.

        Raises:
            OptionError: no spans, spans that overlap, no share, or a method that cannot keep them (the message says
                why). If whole spans leave less of the budget than the method protects, the pass that reads them raises
                `BudgetError`.
            CacheMismatchError: no such sequence, or a span of tokens that were read already.
        """
        protect_spans(self.tracker, self.policy, self.codecs, spans, share, sequence)

    @no_autograd
    def forget(self, *spans: tuple[int, int], sequence: int | None = None) -> None:
        """Drop spans of the text, such as thoughts or a message, from every head of every layer.

        Later tokens stay, at their positions, and the next turn reads only its new ones: pass the whole conversation as
        before, with the spans. It is lossy, since later entries were computed from the spans. Their tokens cannot be
        restored, and from then on `crop` removes tokens only if a pass is recorded.

        Args:
            *spans: (begin, end) of each, in tokens of the sequence's own text, without pads; `end` stays.
            sequence: Sequence to drop them from; None for all.

        Raises:
            OptionError: no span; spans that overlap, are empty or outside the text, or with tokens that `protect`
                keeps; or a method or model from whose cache a span cannot be dropped (the message says why).
            CacheMismatchError: between the parts of a prompt, or in a pass.
            PoolFullError: no room for copies of pages that forks hold; call it again when there is.
        """
        self.passes.check_free()
        if self.states.in_pass or self._first_out_of_step(self.tracker.columns) is not None:
            raise CacheMismatchError("a forward pass was interrupted; call reset() and run the prompt again")
        drop_spans(self, spans, sequence)

    def check_integrity(self) -> None:
        """Assert that every page is held by exactly the tables that name it."""
        check_pages(self.kin)

    def fork(self) -> MillpondCache:
        """Return a copy of this cache at the same position, for one context and many questions.

        The two share pages until one of them writes, and the memory limit; each is closed on its own. Tokens given to
        one are never seen by the other. Only one at a time may be in a pass. `copy.deepcopy` does the same.

        Raises:
            CacheMismatchError: this cache is closed, or in a pass, or its model is gone.
        """
        model = self.model()
        if model is None or self.make_another is None or self._closed:
            raise CacheMismatchError("this cache is closed, or its model is gone: fork it before")
        self.passes.check_free()
        if self.states.in_pass or self._first_out_of_step(self.tracker.columns) is not None:
            raise CacheMismatchError("a forward pass was interrupted; call reset() and run the prompt again")
        other = self.make_another(model)
        other._used = True
        other.kin = self.kin
        self.kin.add(other)
        share(self, other)
        return other

    __copy__ = fork

    def __deepcopy__(self, memo: dict[int, Any]) -> MillpondCache:
        return self.fork()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotPicklableError(
            "a MillpondCache lives in the pages of a pool in this process, next to its model, which a pickle cannot "
            "carry; write the text that it has read with millpond.save_document(cache, ids, path) and take it up with "
            "restore_document, or copy it in this process with cache.fork()"
        )

    def restore_position(self, ids: Tensor) -> None:
        """Count the text of these ids (1, n) as read; the layers hold the kept entries."""
        self._used = True
        self.text.add(ids, 0)
        self.tracker.adopt(ids)
        for layer_cache in self.layer_caches:
            layer_cache.columns = ids.shape[1]
        if self.rebuilder is not None:
            self.rebuilder.adopt(self.tracker.seen)

    def watch(self, observer: Observer | None) -> None:
        """Call `observer` with the queries and entries of each layer and pass; None to stop.

        It is called before entries are stored, and not for passes that repeat a text (KVzip).
        """
        for layer in self.layers:
            if isinstance(layer, MillpondLayer):
                layer.observer = observer

    @no_autograd
    def reset(self) -> None:
        """Forget everything and free all memory, before an unrelated prompt.

        Raises:
            CacheMismatchError: another thread runs a pass with the cache.
        """
        self.passes.check_free()
        self.draft_rollback.reset()
        self.draft_rollback.truncatable = self._croppable
        super().reset()  # type: ignore[no-untyped-call]
        self.states.reset()
        self.tracker.reset()
        self.text.reset()
        self.filled_inside = False
        if self.rebuilder is not None:
            self.rebuilder.reset()
        if self.entropies is not None:
            self.entropies.reset()
        for pool in self.pools:
            pool.trim()

    def close(self) -> None:
        """Free all memory and restore the model's own attention.

        A cache that is merely forgotten does so too. Warns of a cache that was never used (`UnusedCacheWarning`).

        Raises:
            CacheMismatchError: another thread runs a pass with the cache.
        """
        if not self._used and not self._closed:
            warnings.warn(
                "this cache was never used: pass it as cache=, or call generate() inside its `with` block, in "
                "the thread that entered it",
                UnusedCacheWarning,
                stacklevel=2,
            )
        self.passes.check_free()
        if self._stats_at_close is None:
            self._stats_at_close = measure(self)
        self._closed = True
        self.reset()
        for finalizer in self._finalizers:
            finalizer()

    def on_close(self, undo: Callable[[], None]) -> None:
        """Call `undo`, which must not refer to this cache, when the cache is closed or collected."""
        finalizer = weakref.finalize(self, undo)
        finalizer.atexit = False
        self._finalizers.append(finalizer)

    def __enter__(self) -> MillpondCache:
        """Let the model's `generate` use this cache until the block ends, if it gets no other."""
        model = self.model()
        if self.attaches and model is not None:
            enter(model, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        model = self.model()
        if model is not None:
            leave(model, self)
        self._used |= error is not None  # there is something else to be said
        self.close()

    # ------------------------------------------------------------------ for transformers

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can remove tokens: any if none is evicted, else those of a recorded pass."""
        return (self.draft_rollback.truncatable or self.draft_rollback.recording) and not self.states.layers

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select([int(i) for i in beam_idx.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([s for s in range(self.tracker.n_seq) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        selected = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._select([int(i) for i in selected.tolist()])

    def activate_past_recording(self) -> None:
        """Record the next passes, so that `crop` can remove their tokens.

        Raises:
            OptionError: the model holds recurrent states, which cannot be rolled back.
        """
        self.states.check_no_drafts()
        self.draft_rollback.recording = True

    @no_autograd
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Args:
            tokens_to_remove: Their number as a negative count, as transformers passes it.

        Raises:
            CacheMismatchError: a positive count, entries were evicted and no recording covers the tokens, or the model
                holds recurrent states.
        """
        n = -int(tokens_to_remove)  # some versions of transformers pass a tensor
        if n < 0:
            raise CacheMismatchError(f"crop({-n}): pass a negative number, the tokens to take back")
        self.states.check_no_crop(n)
        self.draft_rollback.crop(self.layer_caches, n)

    @no_autograd
    def _select(self, sequences: list[int]) -> None:
        if sequences == list(range(self.tracker.n_seq)):
            return
        self.draft_rollback.commit()
        self.text.select(sequences)
        if self.entropies is not None:
            self.entropies.select(sequences)
        for layer_cache in self.layer_caches:
            layer_cache.select(sequences)
        self.states.select(sequences)
        self.tracker.select(sequences)
        if self.rebuilder is not None:
            self.rebuilder.select(sequences)

    def begin_pass(self, draft: int | None, ids: Tensor | None = None, length: int = 1) -> None:
        """Begin a forward pass of the model.

        Args:
            draft: How many of its last tokens may be rolled back; None for all but the first.
            ids: Ids of its tokens, (B, Q); None if the model was given none.
            length: Q.

        Raises:
            CacheMismatchError: an earlier pass was interrupted when some layers had read its tokens.
            UnsupportedModelError: the states begin at zero in a pass of several tokens, and this is a later one.
        """
        out_of_step = self._first_out_of_step(self.tracker.columns)
        if out_of_step is not None:
            raise CacheMismatchError(
                f"layer {out_of_step[0]} has seen {out_of_step[1].columns} tokens where the cache has seen "
                f"{self.tracker.columns}: a forward pass was interrupted; call reset() and run the prompt again"
            )
        for other in self.kin:  # pages and their counts are shared
            other.passes.check_free()
        if self.entropies is not None:
            self.entropies.check_running()
        if ids is not None and ids.shape[1] == 1 and not self.parts.waits(self.tracker.columns):
            self._rebuild()
        self.states.begin_pass(self.tracker.columns, length)
        self._clear_shared()
        self._used = True
        self.text.add(ids, self.tracker.columns)
        self.tracker.begin_pass(ids)
        self.draft_rollback.draft = draft
        self._before_pass = self.tracker.columns

    def end_pass(self) -> None:
        """End a forward pass of the model.

        Raises:
            UnsupportedModelError: a layer of the model did not use the cache.
        """
        out_of_step = self._first_out_of_step(max(self.tracker.columns, self._before_pass + 1))
        if out_of_step is not None:
            raise UnsupportedModelError(
                f"layer {out_of_step[0]} was given no keys and values in this pass, so the model does not use its "
                "cache as a decoder does; what it holds is not complete"
            )
        self.states.end_pass()
        self._clear_shared()
        if self.parts.waits(self.tracker.columns):
            give_back()  # else entries of this part are after its temporaries, and the heap grows by both
            return
        in_parts = self.parts.end()
        if self._between_chunks:
            self._rebuild()
            plans_waited = in_parts or (
                self.policy.needs_all_layers and self.rebuilder is None
            )  # which plans for itself
            if plans_waited and self.entropies is None:  # these plan when the model's head has run
                self._run_plans()

    def _clear_shared(self) -> None:
        """Forget the entries of the pass that layers without own keys read."""
        for layer_cache in self.layer_caches:
            if layer_cache.shared is not None:
                layer_cache.shared.clear()

    def _rebuild(self) -> None:
        """Run the reconstruction pass if the policy needs it and any sequence has no plan yet."""
        rebuilder = self.rebuilder
        if rebuilder is not None and not rebuilder.running and any(cache.pending for cache in self.layer_caches):
            rebuilder.run(self)

    @no_autograd
    def _run_plans(self) -> None:
        """Run the plans that need all layers, after the last one."""
        for layer_cache in run_plans(one for one in self.layer_caches if one.pending):
            layer_cache.run_plans()

    def _first_out_of_step(self, columns: int) -> tuple[int, LayerCache] | None:
        """Return number and cache of the first layer that has not seen `columns` columns."""
        return next((layer for layer in self.entry_layers.items() if layer[1].columns != columns), None)
