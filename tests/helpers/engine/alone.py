"""Tiny models of a type, their engines, and what `generate` answers alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond_lab.bench.model_types.tiny_model import tiny_model
from tests.helpers.engine.helpers import greedy, prompt

LENGTHS, NEW, WITHIN = (40, 57, 1, 31), 14, 1e-5
BUDGETS = {"full": None, "h2o": "50%", "snapkv": "50%"}


@cache
def model_of(kind: str) -> PreTrainedModel:
    return tiny_model(kind)


@cache
def alone(kind: str, method: str, length: int) -> tuple[list[int], Tensor]:
    """What `generate` answers to the prompt of this length, and the log probabilities of the tokens."""
    model, ids = model_of(kind), torch.tensor([prompt(length)])
    with torch.no_grad(), mp.compress(model, method, BUDGETS[method]) as kept:
        out = model.generate(  # type: ignore[operator]
            ids,
            cache=kept,
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    new = out.sequences[0, length:]
    scores = torch.stack(out.logits)[:, 0].double().log_softmax(-1)
    return new.tolist(), scores[range(NEW), new]


def engine_for(kind: str, method: str = "h2o", **options: Any) -> Engine:
    chosen = {"max_step_tokens": 16, "page_slots": 4} | options
    return Engine(model_of(kind), method=method, budget=BUDGETS[method], **chosen)


def ask(length: int, name: str | None = None, **options: Any) -> Request:
    return Request(request_id=name or str(length), prompt=prompt(length), params=greedy(NEW, **options))
