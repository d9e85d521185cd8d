"""Entropy of a model's predictions and surprisal of each new token, handed to the layers."""

from __future__ import annotations

import weakref
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.cache.entries.read_write import set_scores
from millpond.cache.state.positions import ForwardSpan
from millpond.errors import CacheMismatchError, OptionError, UnsupportedModelError
from millpond.hf.grad_mode import no_autograd
from millpond.models.cache_argument import cache_among
from millpond.policy.needs import Entropies

if TYPE_CHECKING:
    from millpond.hf.protocol import LayerCaches


#: Numbers of logits that are widened to float32 at a time: a few MB, which stay in the cache of a core.
BLOCK = 2**19


class Predictions:
    """Remembers what was predicted after the newest token of each sequence, for the pass to come."""

    def __init__(self) -> None:
        self._next: Tensor | None = None  # (S, vocabulary)

    def select(self, sequences: list[int]) -> None:
        """Follow a choice of sequences."""
        if self._next is not None:
            self._next = self._next[sequences]

    def entropies(self, logits: Tensor, ids: Tensor, span: ForwardSpan) -> Tensor:
        """Return -log P of each sequence's new tokens, (S, n) float32, in their order; anything after the last.

        The first token of a text has inf.

        Args:
            logits: (S, Q, vocabulary) of a pass.
            ids: (S, Q), its tokens.
        """
        if span.q_pos is not None and span.valid is None and self._next is not None:  # a token for each sequence
            out, self._next = surprise(self._next, ids[:, 0])[:, None], logits[:, 0].clone()
            return out
        n_seq, width, vocabulary = logits.shape
        rows, columns = torch.nonzero(span.grid().to(logits.device) >= 0, as_tuple=True)  # tokens, row by row, no pads
        own = ids[rows, columns]
        starts = torch.ones_like(rows, dtype=torch.bool)
        starts[1:] = rows[1:] != rows[:-1]
        place = torch.arange(len(rows), device=rows.device)
        place = place - place.masked_fill(~starts, 0).cummax(0).values
        out = torch.full((n_seq, width), torch.inf, device=logits.device)
        later = (~starts).nonzero()[:, 0]
        found = [
            surprise(logits[rows[tokens - 1], columns[tokens - 1]], own[tokens])
            for tokens in torch.split(later, max(1, BLOCK // vocabulary))
        ]
        out[rows[later], place[later]] = torch.cat(found) if found else out[:0, 0]
        known = torch.from_numpy(span.before > 0).to(rows.device)[rows] & starts
        before = logits.new_zeros(n_seq, vocabulary) if self._next is None else self._next.clone()
        out[rows[known], 0] = surprise(before[rows[known]], own[known])
        ends = starts.roll(-1)
        before[rows[ends]] = logits[rows[ends], columns[ends]]
        self._next = before
        return out


def surprise(logits: Tensor, ids: Tensor) -> Tensor:
    """Return -log P, (n,) float32(id) of ids (n,) under logits (n, vocabulary), in float32 or wider; inf for ids beyond
    it.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    inside = ids.clamp(max=logits.shape[-1] - 1)
    found = -logits.log_softmax(-1, dtype=wide).gather(-1, inside[:, None])[:, 0]
    return found.masked_fill(ids != inside, torch.inf).float()


#: Most decoded tokens whose entropies layers get late.
MOST_WAITING = 256


class TokenEntropyHook:
    """Hooks that make a model compute the logits of all tokens, and return only those requested.

    Knows the cache only weakly, so that a forgotten cache can be collected.

    Raises:
        UnsupportedModelError: the model predicts nothing.
    """

    def __init__(self, cache: LayerCaches, model: PreTrainedModel, entropies: Entropies, between_chunks: bool) -> None:
        head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} predicts no tokens, which this method looks at; use the model with its head, "
                "such as the ...ForCausalLM of its family"
            )
        self._cache = weakref.ref(cache)
        self._decay = entropies.decay
        self._between_chunks = between_chunks
        self._asked: int | Tensor = 0  # which logits the running pass computes
        self._ids: Tensor | None = None
        self._start = -1  # columns before the running pass; -1 while there is none
        self._decoded: np.ndarray = np.zeros(0, dtype=bool)  # (S,) whether tokens were decoded since the last prompt
        self._predictions = Predictions()
        self._waiting: list[Tensor] = []  # (S, 1) entropies of decoded tokens that no layer has yet
        self._since: np.ndarray = np.zeros(0, dtype=np.int64)  # (S,) position of the first of these
        self._protected = 1  # how many newest tokens no layer can evict
        self._hooks = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]

    def check_running(self) -> None:
        """
        Raises:
            CacheMismatchError: only a part of the model runs, or it was given no token ids.
            OptionError: the tokens of this pass may be taken back.
        """
        cache = self._cache()
        if self._start < 0:
            raise CacheMismatchError(
                "this method looks at the model's predictions, and only its decoder was called; call the model itself"
            )
        if self._ids is None:
            raise CacheMismatchError(
                "this method looks at token ids, and the model was given none (inputs_embeds); pass input_ids"
            )
        if cache is not None and cache.draft_rollback.recording:
            raise OptionError(
                "draft tokens of assisted generation are chosen from before they are predicted; use another method "
                "with it"
            )

    def select(self, sequences: list[int]) -> None:
        """Follow a choice of sequences; the layers have not done so yet."""
        self.tell()
        self._decoded = self._decoded[sequences]
        self._predictions.select(sequences)

    def become(self, other: TokenEntropyHook) -> None:
        """Copy the state of `other`, of a cache at the same position; all layers have their entropies."""
        self._decoded, self._predictions = other._decoded.copy(), copy(other._predictions)
        self._protected = other._protected

    def reset(self) -> None:
        """Forget everything."""
        self._decoded, self._predictions, self._waiting = self._decoded[:0], Predictions(), []

    def close(self) -> None:
        """Take the hooks away."""
        while self._hooks:
            self._hooks.pop().remove()

    # ------------------------------------------------------------------ a pass

    @staticmethod
    def _carries(cache: LayerCaches | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a pass is one of this cache; others may run in other threads."""
        return cache is not None and (cache_among(kwargs) is cache or any(a is cache for a in args))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = self._cache()
        if cache is None or not self._carries(cache, args, kwargs):
            return None
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._ids = ids if isinstance(ids, Tensor) and ids.ndim == 2 else None
        self._start = cache.tracker.columns
        self._asked = kwargs.get("logits_to_keep", 0)
        return args, {**kwargs, "logits_to_keep": 0} if "logits_to_keep" in kwargs else kwargs

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        cache, start = self._cache(), self._start
        if not self._carries(cache, args, kwargs):
            return None
        self._start = -1
        if output is None or cache is None or start < 0:  # not this cache, or an exception
            return None
        if isinstance(output, tuple):
            place = next(i for i, part in enumerate(output) if isinstance(part, Tensor) and part.ndim == 3)
            self._learn(cache, start, output[place])
            return (*output[:place], self._wanted(output[place]), *output[place + 1 :])
        self._learn(cache, start, output.logits)
        output.logits = self._wanted(output.logits)
        return None

    def _wanted(self, logits: Tensor) -> Tensor:
        """Return the logits requested by the caller, of (S, Q, vocabulary)."""
        asked = self._asked
        return logits[:, slice(-asked, None) if isinstance(asked, int) else asked]

    @no_autograd
    def _learn(self, cache: LayerCaches, start: int, logits: Tensor) -> None:
        """Take in the logits (S, Q, vocabulary) of the pass that began after `start` columns."""
        tracker, ids = cache.tracker, self._ids
        assert ids is not None, "a pass without ids was refused when it began"
        span = tracker.span(start, tracker.columns - start, tracker.n_seq, None, logits.device)
        entropies = self._predictions.entropies(logits.detach(), ids.to(logits.device), span)
        decoding = span.decoding
        if span.length == 1 and decoding.all():
            self._decoded = decoding
            self._wait(cache, span, entropies)
            return
        if len(self._decoded) != tracker.n_seq:
            self._decoded = np.zeros(tracker.n_seq, dtype=bool)
        began = (span.after > span.before) & ~decoding
        another_round = began & self._decoded
        self._decoded = (self._decoded & ~began) | decoding
        self.tell()
        factors = np.where(another_round, self._decay, 1.0)
        self._rescore(cache, span.before, entropies, factors if another_round.any() else None)
        for layer_cache in (
            cache.layer_caches if self._between_chunks and not cache.parts.waits(tracker.columns) else ()
        ):
            if layer_cache.pending:
                layer_cache.run_plans()
        self._protected = 1

    def _wait(self, cache: LayerCaches, span: ForwardSpan, entropies: Tensor) -> None:
        """Tell the layers of decoded tokens when the first of these can be evicted; no plan needs them before."""
        if not self._waiting:
            self._since = span.before
        self._waiting.append(entropies)
        if len(self._waiting) >= min(self._protected, MOST_WAITING):
            self.tell()
            tables = [layer_cache.table for layer_cache in cache.layer_caches if layer_cache.table is not None]
            self._protected = min((int(table.recent.min()) for table in tables), default=1)

    @no_autograd
    def tell(self) -> None:
        """Tell every layer of the decoded tokens that it does not know about yet."""
        cache, waiting = self._cache(), self._waiting
        self._waiting = []
        if cache is not None and waiting:
            self._rescore(cache, self._since, torch.cat(waiting, 1))

    def _rescore(
        self, cache: LayerCaches, before: np.ndarray, entropies: Tensor, factors: np.ndarray | None = None
    ) -> None:
        """Write the entropies (S, n) of the tokens from `before` (S,) on with their entries, in every layer."""
        for layer_cache in cache.layer_caches:
            if layer_cache.table is not None:
                here = layer_cache.table.lens.device
                first = torch.from_numpy(before.astype(np.int32)).to(here)
                aged = None if factors is None else torch.from_numpy(factors.astype(np.float32)).to(here)
                set_scores(layer_cache.table, first, entropies.to(here), aged)
