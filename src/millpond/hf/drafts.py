"""Drafts of assisted and prompt-lookup generation, which begin behind the prompt.

transformers sends the first draft through the model together with the prompt. A token of such a pass is read as a part
of a prompt, with other sums than a decoding step has, so that it could differ in its last bits from what it would be
without a draft. So nothing is drafted until the prompt is read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def begin_behind_prompt(generator: Any) -> Any:
    """The same candidate generator of transformers, whose first draft is dropped; it is made, as its state needs it.

    One that needs what the first pass of the model gives stays as it is.
    """
    if getattr(generator, "requires_model_outputs", False):
        return generator
    own = generator.get_candidates

    def prompt_alone(input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        own(input_ids, *args, **kwargs)
        del generator.get_candidates
        return input_ids, None

    generator.get_candidates = prompt_alone
    return generator
