"""Thresholds of a model's layers for merging runs of similar keys (KVMerger, arXiv:2407.08454)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.budget import Budget
from millpond.errors import DataError
from millpond.hf.compress import compress
from millpond.methods import METHODS
from millpond.methods.kvmerger import RunPivots
from millpond.models.cache_argument import cache_argument
from millpond.policy.view import View

#: Fewest tokens of a window: fewer have no neighbours worth counting.
MIN_LENGTH = 64


@dataclass(frozen=True, slots=True)
class RecordedPivots(RunPivots):
    """Pivots whose runs record the cosines of neighbours that may join, and how many have to.

    Attributes:
        cosines: By layer, one tensor (n,) per window.
        excess: By layer, joins that leave the budget, one number per window.
    """

    cosines: dict[int, list[Tensor]] = field(default_factory=dict)
    excess: dict[int, list[int]] = field(default_factory=dict)

    def runs(self, view: View, attention: Tensor) -> Tensor:
        joinable, similarity = self.neighbours(view, attention)
        self.cosines.setdefault(view.layer, []).append(similarity[joinable].float().cpu())
        self.excess.setdefault(view.layer, []).append(int((view.counts - view.budget).clamp(min=0).sum()))
        return RunPivots.runs(self, view, attention)


def layer_thresholds(
    model: PreTrainedModel,
    ids: Tensor,
    budget: str | int | float | Budget = "50%",
    *,
    windows: int = 8,
    length: int = 1024,
    **options: Any,
) -> tuple[float, ...]:
    """Return the cosine of each layer above which neighbours merge to leave a budget.

    The heads of a layer, and all windows of the text, have one threshold: that which as many neighbours exceed as have
    to join. The paper holds that its share of merged entries is then the same on other texts.

    Args:
        model: Model to measure.
        ids: Tokens (n,) of a text like those that the model will read.
        budget: Entries per KV head to leave, such as "50%".
        windows: Runs of tokens to read, spread over the text.
        length: Tokens of a run.
        **options: Options of `kvmerger` that decide which entries may join: `recent`, `top`, `sinks`, `shared`.

    Returns:
        (layers,) cosines, -1 where all neighbours join; join them with semicolons for `kvmerger:eps=`.

    Raises:
        DataError: the text is shorter than one window.
        OptionError: no such option.
        BudgetError: a budget that cannot be parsed.
    """
    if length < MIN_LENGTH or windows < 1 or len(ids) < length:
        raise DataError(
            f"{len(ids)} tokens for {windows} windows of {length}: give a text of at least one window, and windows of "
            f"{MIN_LENGTH} tokens or more"
        )
    policy = METHODS.get("kvmerger")(**options)
    assert isinstance(policy.score, RunPivots)
    recorded = RecordedPivots(policy.score.base, None, policy.score.top, policy.score.shared)
    step = (len(ids) - length) // max(windows - 1, 1)
    with compress(model, replace(policy, score=recorded), budget, codec="auto") as cache, torch.no_grad():
        for window in range(windows):
            cache.reset()
            run = ids[window * step : window * step + length][None].to(model.device)
            model(run, **cache_argument(cache), logits_to_keep=1)
            for layer_cache in cache.layer_caches:
                layer_cache.run_plans()
    layers = sorted(recorded.cosines)
    return tuple(_threshold(recorded.cosines[layer], recorded.excess[layer]) for layer in layers)


def _threshold(cosines: Sequence[Tensor], excess: Sequence[int]) -> float:
    """Return the number that as many of the cosines exceed as have to join."""
    ranked = torch.cat(list(cosines)).sort(descending=True).values
    n = sum(excess)
    return float(ranked[n]) if n < len(ranked) else -1.0
