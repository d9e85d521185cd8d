"""A check that prompts fit into a model's positions, before any of them is run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from millpond.errors import OptionError
from millpond_lab.evals.decoding.batch import EncodedPrompt
from millpond_lab.evals.decoding.record import Protocol


class TooLongWarning(UserWarning):
    """Some prompts have more tokens than the model has positions."""


def positions_needed(prompt: EncodedPrompt, protocol: Protocol) -> int:
    """Positions that a prompt takes at least: context, question and what is fed, but for its last token.

    Answers that are decoded may be short, and with `turns` those of earlier questions come in between: what they take
    is not in it.
    """
    asked = [len(one.tokens) for one in prompt.asked]
    fed = [max((len(target) for target in one.targets), default=1) - 1 for one in prompt.asked]
    each = [sum(parts) for parts in zip(asked, fed, strict=True)]
    return prompt.read_before + (sum(each) if protocol == "turns" else max(each))


def check_fit(task: str, protocol: Protocol, prompts: Sequence[EncodedPrompt], limit: int | None) -> None:
    """Refuse a task of which no prompt fits into the model, and warn where some do not.

    Args:
        limit: positions of the model; None for no limit.

    Raises:
        OptionError: every prompt is too long.
    """
    long = [need for need in (positions_needed(prompt, protocol) for prompt in prompts) if limit and need > limit]
    if not long:
        return
    what = (
        f"{len(long)} of {len(prompts)} prompts of {task!r} ({protocol}) have more tokens (up to {max(long):,}) than "
        f"the model has positions ({limit:,})"
    )
    way = (
        "shorten them (length=, lengths=, max_tokens= or context_len= of the task), or name a model with more positions"
    )
    if len(long) == len(prompts):
        raise OptionError(f"{what}; {way}")
    warnings.warn(f"{what}, and count as failures; {way}", TooLongWarning, stacklevel=4)
