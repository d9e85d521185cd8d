"""Entropy of a model's predictions and surprisal of each new token, for the layers."""

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
    """Logits after the newest token of each sequence, for the next pass."""

    def __init__(self) -> None:
        self._next: Tensor | None = None  # (S, vocabulary)

    def select(self, sequences: list[int]) -> None:
        """Follow a selection of sequences."""
        if self._next is not None:
            self._next = self._next[sequences]

    def entropies(self, logits: Tensor, ids: Tensor, span: ForwardSpan) -> Tensor:
        """Return -log P of each sequence's new tokens, (S, n) float32, in their order.

        Numbers after the last have no meaning. The first token of a text has inf.

        Args:
            logits: Logits of a pass, (S, Q, vocabulary).
            ids: Its tokens, (S, Q).
            span: Positions of the pass.
        """
        if span.q_pos is not None and span.valid is None and self._next is not None:  # a token for each sequence
            out, self._next = surprise(self._next, ids[:, 0])[:, None], logits[:, 0].clone()
            return out
        n_seq, width, vocabulary = logits.shape
        rows, columns = torch.nonzero(span.grid().to(logits.device) >= 0, as_tuple=True)  # tokens, row by row, no pads
        token_ids = ids[rows, columns]
        starts = torch.ones_like(rows, dtype=torch.bool)
        starts[1:] = rows[1:] != rows[:-1]
        index = torch.arange(len(rows), device=rows.device)
        index = index - index.masked_fill(~starts, 0).cummax(0).values
        out = torch.full((n_seq, width), torch.inf, device=logits.device)
        followers = (~starts).nonzero()[:, 0]
        entropies = [
            surprise(logits[rows[tokens - 1], columns[tokens - 1]], token_ids[tokens])
            for tokens in torch.split(followers, max(1, BLOCK // vocabulary))
        ]
        out[rows[followers], index[followers]] = torch.cat(entropies) if entropies else out[:0, 0]
        continued = torch.from_numpy(span.before > 0).to(rows.device)[rows] & starts
        predicted = logits.new_zeros(n_seq, vocabulary) if self._next is None else self._next.clone()
        out[rows[continued], 0] = surprise(predicted[rows[continued]], token_ids[continued])
        ends = starts.roll(-1)
        predicted[rows[ends]] = logits[rows[ends], columns[ends]]
        self._next = predicted
        return out


def surprise(logits: Tensor, ids: Tensor) -> Tensor:
    """Return -log P(id) of ids (n,) under logits (n, vocabulary), (n,) float32.

    It is computed in float32 or wider, and inf for ids beyond the vocabulary.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    known_ids = ids.clamp(max=logits.shape[-1] - 1)
    surprisals = -logits.log_softmax(-1, dtype=wide).gather(-1, known_ids[:, None])[:, 0]
    return surprisals.masked_fill(ids != known_ids, torch.inf).float()


#: Most decoded tokens whose entropies layers get late.
MAX_WAITING = 256


class TokenEntropyHook:
    """Hooks that let a model compute the logits of all tokens, and return the requested ones.

    They refer to the cache only weakly, so that a forgotten cache can be collected.

    Args:
        cache: Cache whose passes are hooked.
        model: Model of the cache.
        entropies: Settings of the policy.
        between_chunks: Whether to plan after every pass of several tokens.

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
        self._requested: int | Tensor = 0  # which logits the running pass computes
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
        """Check that the running pass computes entropies.

        Raises:
            CacheMismatchError: only a part of the model runs, or it was given no token ids.
            OptionError: the tokens of this pass may be rolled back.
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
        """Follow a selection of sequences, before the layers do."""
        self.tell()
        self._decoded = self._decoded[sequences]
        self._predictions.select(sequences)

    def become(self, other: TokenEntropyHook) -> None:
        """Copy the state of `other`, of a cache at the same position.

        All layers have their entropies.
        """
        self._decoded, self._predictions = other._decoded.copy(), copy(other._predictions)
        self._protected = other._protected

    def reset(self) -> None:
        """Forget everything."""
        self._decoded, self._predictions, self._waiting = self._decoded[:0], Predictions(), []

    def close(self) -> None:
        """Remove the hooks."""
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
        self._requested = kwargs.get("logits_to_keep", 0)
        return args, {**kwargs, "logits_to_keep": 0} if "logits_to_keep" in kwargs else kwargs

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        cache, start = self._cache(), self._start
        if not self._carries(cache, args, kwargs):
            return None
        self._start = -1
        if output is None or cache is None or start < 0:  # not this cache, or an exception
            return None
        if isinstance(output, tuple):
            index = next(i for i, part in enumerate(output) if isinstance(part, Tensor) and part.ndim == 3)
            self._add_logits(cache, start, output[index])
            return (*output[:index], self._requested_logits(output[index]), *output[index + 1 :])
        self._add_logits(cache, start, output.logits)
        output.logits = self._requested_logits(output.logits)
        return None

    def _requested_logits(self, logits: Tensor) -> Tensor:
        """Return the logits requested by the caller, of (S, Q, vocabulary)."""
        requested = self._requested
        return logits[:, slice(-requested, None) if isinstance(requested, int) else requested]

    @no_autograd
    def _add_logits(self, cache: LayerCaches, start: int, logits: Tensor) -> None:
        """Compute entropies from the logits (S, Q, vocabulary) of the pass after `start` columns."""
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
        """Collect entropies of decoded tokens until the first of these can be evicted.

        No plan needs them before; then the layers get them.
        """
        if not self._waiting:
            self._since = span.before
        self._waiting.append(entropies)
        if len(self._waiting) >= min(self._protected, MAX_WAITING):
            self.tell()
            tables = [layer_cache.table for layer_cache in cache.layer_caches if layer_cache.table is not None]
            self._protected = min((int(table.recent.min()) for table in tables), default=1)

    @no_autograd
    def tell(self) -> None:
        """Write the entropies of decoded tokens that layers do not have yet."""
        cache, waiting = self._cache(), self._waiting
        self._waiting = []
        if cache is not None and waiting:
            self._rescore(cache, self._since, torch.cat(waiting, 1))

    def _rescore(
        self, cache: LayerCaches, before: np.ndarray, entropies: Tensor, factors: np.ndarray | None = None
    ) -> None:
        """Write the entropies (S, n) of the tokens from `before` (S,) on, in every layer."""
        for layer_cache in cache.layer_caches:
            if layer_cache.table is not None:
                device = layer_cache.table.lens.device
                first = torch.from_numpy(before.astype(np.int32)).to(device)
                aged = None if factors is None else torch.from_numpy(factors.astype(np.float32)).to(device)
                set_scores(layer_cache.table, first, entropies.to(device), aged)
