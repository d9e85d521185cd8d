"""Tiny models of a type, what they write with transformers' own cache, and with another."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond_lab.bench.model_types.greedy import Run, generated
from millpond_lab.bench.model_types.tiny_model import tiny_model

STEPS, WITHIN = 64, 1e-5


@cache
def model_of(kind: str) -> PreTrainedModel:
    return tiny_model(kind)


@cache
def stock_of(kind: str) -> Run:
    with torch.no_grad():
        return generated(model_of(kind), None, new=STEPS)


def ids_of(length: int, seed: int = 2, batch: int = 1) -> Tensor:
    return torch.randint(3, 80, (batch, length), generator=torch.Generator().manual_seed(seed))


def write(model: PreTrainedModel, ids: Tensor, new: int = 8, **given: Any) -> Tensor:
    settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, **settings | given)  # type: ignore[operator,no-any-return]
