"""Greedy generation of a padded batch of two, and how equal two of them are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from millpond import MillpondCache
from millpond.models.cache_argument import cache_argument
from millpond_lab.bench.model_types.masked import Held, Masked, attending
from millpond_lab.bench.model_types.pictures import picture_inputs

LENGTHS = [24, 17]  #: of the prompts; padded on the left
NEW = 6  #: tokens that are generated
WITHIN = 1e-4  #: logits that are equal, relative to the largest one where that is above 1


class Wrong(Exception):
    """Not what it ought to be; the message says what and by how much."""


@dataclass(frozen=True, slots=True)
class Run:
    """ids (B, n + new), logits (new, B, V) in float64, and what was held after each pass."""

    ids: Tensor
    logits: Tensor
    held: list[Held]


def generated(
    model: PreTrainedModel, cache: Any, follow: Callable[[Tensor, Tensor], Tensor] | None = None, new: int = NEW
) -> Run:
    """Greedy generation of `new` tokens after the prompts; `follow` may replace the scores of each step."""
    ids, mask = prompts()
    held: list[Held] = []

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        if isinstance(cache, MillpondCache):
            held.append({n: [cache.positions(n, s) for s in range(len(ids))] for n in cache.entry_layers})
        return scores if follow is None else follow(ids, scores)

    given: dict[str, Any] = {} if cache is None else cache_argument(cache)
    picture = picture_inputs(model.config.model_type, mask)
    # that of the model, where it takes a picture in; else not, as one may pass no processors on (Janus)
    generate: Any = type(model).generate if picture else GenerationMixin.generate  # type: ignore[attr-defined]
    out = generate(
        model,
        **picture,
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=[note],
        **given,
    )
    return Run(out.sequences, torch.stack(out.logits).double(), held)


def prompts() -> tuple[Tensor, Tensor]:
    """Token ids and mask, (B, n)."""
    width = max(LENGTHS)
    ids = torch.randint(3, 80, (len(LENGTHS), width), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([(torch.arange(width) >= width - n).long() for n in LENGTHS])
    return ids * mask, mask


def masked_run(model: PreTrainedModel, run: Run, hide: bool = True) -> Run:
    """Stock generation over everything that writes the tokens of `run` and shows at each step what that run held."""
    masked = Masked(torch.tensor([max(LENGTHS) - n for n in LENGTHS]))
    step = 0

    def follow(ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal step
        masked.held = run.held[step] if hide else None
        wanted = run.ids[:, max(LENGTHS) + step, None]
        step += 1
        return torch.full_like(scores, -torch.inf).scatter(1, wanted, 0.0)

    with attending(model, masked):
        return generated(model, masked.cache(model), follow, new=len(run.logits))


def compare(found: Run, expected: Run, where: str, within: float = WITHIN) -> None:
    scale = max(1.0, float(expected.logits.abs().max()))
    apart = float((found.logits - expected.logits).abs().max()) / scale
    if not apart <= within:
        raise Wrong(f"{where}: logits differ by {apart:.1e}")
    if not torch.equal(found.ids, expected.ids):
        raise Wrong(f"{where}: other tokens")
