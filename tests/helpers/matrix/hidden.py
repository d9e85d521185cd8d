"""What every method that chooses by more than positions is held to: a mask over the full cache, and any chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import millpond as mp
from tests.helpers.matrix.oracle import Oracle, Rule, running


class Mask(Oracle):
    """An oracle that hides from a full cache what another cache no longer holds."""

    def __init__(self, cache: Any) -> None:
        super().__init__(Rule("newest", 0))
        self.cache = cache

    def _update(self, layer: int, b: int, rows_of: list[list[list[float]]], n_past: int, n: int) -> None:
        for h in range(len(rows_of)):
            self.heads[layer, b, h].kept = self.cache.positions(layer, b)[h]


def passes(
    model: PreTrainedModel, cache: Any, oracle: Oracle, turns: Sequence[Tensor], mask: Tensor
) -> Iterator[tuple[float, float]]:
    """Pass `turns` of tokens through `cache`, and through a full cache under `oracle`.

    Args:
        mask: attention mask of the first turn; the others have no padding.

    Yields:
        For each turn the largest difference of logits at real tokens, and the largest logit.
    """
    stock, seen = DynamicCache(config=model.config), mask[:, :0]
    for number, step in enumerate(turns):
        seen = torch.cat([seen, mask if number == 0 else torch.ones_like(step)], 1)
        places = (seen.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
        inputs = {"attention_mask": seen, "position_ids": places}
        ours = model(step, cache=cache, **inputs).logits
        with running(model, oracle):
            theirs = model(step, cache=stock, **inputs).logits
        real = seen[:, -step.shape[1] :].bool()
        yield float((ours - theirs)[real].abs().max()), float(theirs.abs().max())


def steps_after(ids: Tensor, steps: int) -> list[Tensor]:
    """`ids`, and `steps` single tokens that are the same each time."""
    later = torch.randint(2, 96, (len(ids), steps), generator=torch.Generator().manual_seed(2))
    return [ids, *later.split(1, 1)]


def equals_a_mask(
    model: PreTrainedModel,
    cache: Any,
    ids: Tensor,
    mask: Tensor,
    steps: int,
    oracle: Oracle | None = None,
    within: float = 1e-12,
    after: Callable[[], None] = lambda: None,
) -> None:
    """A padded prompt and `steps` tokens: outputs are those of a full cache that hides what was dropped.

    oracle: knows what to hide; None: what `cache` no longer holds. after: called after the prompt and each step.
    """
    for t, (error, _) in enumerate(passes(model, cache, oracle or Mask(cache), steps_after(ids, steps), mask)):
        assert error <= within, f"step {t}"
        after()


def kept_in_any_chunks(model: PreTrainedModel, ids: Tensor, prompt: int, method: str, **options: Any) -> list[Any]:
    """Positions held after a prompt and single tokens; the same whether the prompt came in a piece or in chunks."""
    found = []
    for chunk in (prompt, 7):
        with torch.no_grad(), mp.compress(model, method, between_chunks=False, **options) as cache:
            for begin in range(0, prompt, chunk):
                model(ids[:, begin : min(begin + chunk, prompt)], cache=cache)
            for t in range(prompt, ids.shape[1]):
                model(ids[:, t : t + 1], cache=cache)
            found.append([cache.positions(layer) for layer in range(len(cache.layers))])
            cache.check_integrity()
    assert found[0] == found[1]
    return found[0]
