"""Requests to a tiny engine, and what generate() of the same model answers one by one."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from tests.helpers.hf.families import generate, shared_model, text

#: Lengths of prompts, one of a single token among them.
LENGTHS = (40, 57, 1, 31)
NEW = 14

#: Methods that the engine runs, with the options that they need.
METHODS: dict[str, dict[str, Any]] = {
    name: {} for name in mp.list_methods() if name not in ("attention_matching", "kvzip", "sirllm")
}
METHODS["fastgen"] = {"special": "1", "punctuation": "5;6;7"}
METHODS["random_attention"], METHODS["vase"] = {"recent": 8}, {"window": 8}  # a budget of 64 has room beside these
KEEP_ALL = ("full", "minference")
#: Methods whose step is more than attention and what is noted behind it: keys turn or are chosen, entries merge, or
#: plans are made between prompts.
BY_LAYER = {
    *("attention_gate", "cam", "d2o", "ems", "infllm", "minference", "random_attention", "rkv", "streaming"),
    *("kvzap", "triattention", "vase"),
}


def prompt(length: int) -> tuple[int, ...]:
    """The prompt of this length."""
    return tuple(text(1, length, seed=length)[0].tolist())


def budget_of(method: str) -> str | None:
    return None if method in KEEP_ALL else "30%"


@cache
def alone(method: str, length: int, new: int = NEW, family: str = "llama") -> list[int]:
    """What `generate` answers to the prompt of this length, with nothing beside it."""
    model, ids = shared_model(family), torch.tensor([prompt(length)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)  # a share of a few tokens
        with mp.compress(model, method, budget_of(method), **METHODS[method]) as kept:
            out = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, new, cache=kept)
    return [int(i) for i in out[0, length:]]


def greedy(new: int = NEW, **options: Any) -> mp.SamplingParams:
    return mp.SamplingParams(max_tokens=new, temperature=0, **options)


def engine_for(method: str = "h2o", family: str = "llama", **options: Any) -> Engine:
    """A tiny engine of a method. A share of a short prompt's few tokens warns: `add` and `finish` filter that."""
    chosen = {"max_step_tokens": 16, "page_slots": 4} | options
    return Engine(shared_model(family), method=method, options=METHODS[method], budget=budget_of(method), **chosen)


def ask(length: int, params: mp.SamplingParams | None = None, name: str | None = None, **rest: Any) -> Request:
    """A request with the prompt of this length, named by it."""
    return Request(request_id=name or str(length), prompt=prompt(length), params=params or greedy(), **rest)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Step until all is done, with all pages and the limit checked behind each step; what became of each request."""
    done: dict[str, RequestOutput] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        while engine.busy:
            done |= {output.request_id: output for output in engine.step() if output.finished}
            engine.check_integrity()
    assert engine.stats().kv_bytes == engine.stats().kv_reserved == 0
    return done


def add(engine: Engine, *requests: Request) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        for request in requests:
            engine.add(request)


def tokens(output: RequestOutput, index: int = 0) -> list[int]:
    return list(output.completions[index].token_ids)
