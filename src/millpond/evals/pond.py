"""The tasks in the language of `pond-recall`, whose tokenizer knows 1,024 words and no English sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from millpond.evals.sample import Sample


def speaks_pond(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether this is the tokenizer of `pond-recall`."""
    raise NotImplementedError


def pond_samples(family: str, count: int, seed: int, *, length: int, **knobs: Any) -> Iterator[Sample]:
    """Samples of one family (the task's name) in the language of `pond-recall`, `length` tokens each."""
    raise NotImplementedError
