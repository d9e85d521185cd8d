"""Passes of a model that read one token for each sequence and ask for nothing but its logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from millpond.hf.cache import MillpondCache
from millpond.models.cache_argument import CACHE_ARGUMENTS

#: Arguments of passes that may be replayed; any other takes the model's own forward, unless it is None or False.
_KNOWN = {"input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict", *CACHE_ARGUMENTS}


class NewTokens(NamedTuple):
    """Newest tokens of a pass, one for each sequence.

    Attributes:
        ids: Their ids, (B, 1).
        mask: Mask of the pass, (B, columns); None for no pads.
        position_ids: Their positions, (B or 1, 1); None for those that the model gives them.
    """

    ids: Tensor
    mask: Tensor | None
    position_ids: Tensor | None

    def positions(self, cache: MillpondCache) -> Tensor | None:
        """Return the positions (B,) of the tokens.

        None if one is a pad, or the model chooses them by pads.

        The pass begins for the layers, whichever forward runs. The mask is looked at, for which the host waits, unless
        `generate` has made the tokens.

        Raises:
            CacheMismatchError: as the layers do, see `PositionTracker.span`.
        """
        tracker, begin = cache.tracker, cache.passes.answer_begin
        columns, mask = tracker.columns, self.mask
        if mask is not None and mask.shape[1] != columns + 1:
            return None
        if begin is not None and columns >= begin:
            mask = None
        span = tracker.span(columns, 1, len(self.ids), None if mask is None else mask.bool(), self.ids.device)
        if span.valid is not None:
            return None
        if self.position_ids is not None:
            return self.position_ids.expand(len(self.ids), 1)[:, 0]
        return span.q_pos if (span.before == columns).all() else None


def new_tokens(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewTokens | None:
    """Return the tokens of a pass of one for each sequence that asks for logits alone.

    None for others.
    """
    given = kwargs if not args else {"input_ids": args[0], **kwargs}
    ids, mask, positions = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if len(args) > 1 or any(given[n] is not None and given[n] is not False for n in given.keys() - _KNOWN):
        return None
    keep = given.get("logits_to_keep", 0)
    if type(keep) is not int or keep not in (0, 1) or given.get("return_dict") is False:
        return None
    config = model.config
    if not getattr(config, "return_dict", True) or getattr(config, "output_hidden_states", False):
        return None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] != 1 or ids.device != model.device:
        return None
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != len(ids)):
        return None
    if positions is not None and (not isinstance(positions, Tensor) or positions.shape not in ((1, 1), ids.shape)):
        return None
    return NewTokens(ids, mask, positions)


def is_plain(cache: MillpondCache, model: Any) -> bool:
    """Whether a pass that the cache's hooks have begun is read by its layers alone."""
    return (
        cache.passes.running
        and cache.model() is model
        and cache.tracker.columns > 0
        and not cache.draft_rollback.recording
        and not (cache.rebuilder is not None and cache.rebuilder.running)
        and not any(getattr(layer, "observer", None) for layer in cache.layers)
    )


def computes_alone(model: Any) -> bool:
    """Whether torch runs the model as it is: no gradients, no autocast, no compiler."""
    if model.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not torch.is_autocast_enabled(model.device.type)
