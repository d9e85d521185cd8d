"""Prompts of chunks to a tiny engine, and whether two outputs are the same."""

from __future__ import annotations

from typing import Any

import millpond as mp
from millpond.cache.chunks.store import ChunkStore
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from tests.helpers.engine.helpers import METHODS, add, budget_of, greedy, prompt, tokens
from tests.helpers.hf.families import shared_model

A, B, C = prompt(23), prompt(17), prompt(31)
LEAD, QUESTION = prompt(5), prompt(6)


def chunked(*parts: tuple[int, ...] | mp.Chunk) -> mp.Prompt:
    return mp.Prompt(list(parts))


PROMPTS = {
    "ab": chunked(LEAD, mp.Chunk(A), mp.Chunk(B), QUESTION),
    "ba": chunked(LEAD, mp.Chunk(B), mp.Chunk(A), QUESTION),
    "cba": chunked(mp.Chunk(C), mp.Chunk(B), LEAD, mp.Chunk(A), QUESTION),
    "a": chunked(mp.Chunk(A), QUESTION),
    "aa": chunked(mp.Chunk(A), mp.Chunk(A), QUESTION),
}


def ids_of(asked: mp.Prompt) -> tuple[int, ...]:
    return tuple(token for part in asked.parts for token in (part.content if isinstance(part, mp.Chunk) else part))  # type: ignore[misc]


def engine(name: str = "llama", method: str = "full", store: ChunkStore | None = None, **options: Any) -> Engine:
    chosen = {"max_step_tokens": 16, "page_slots": 4, "budget": budget_of(method), "options": METHODS[method]} | options
    return Engine(shared_model(name), method=method, chunk_store=store or ChunkStore(None), **chosen)


def ask(of: Engine, asked: mp.Prompt | tuple[int, ...], new: int = 8, **options: Any) -> Any:
    """The output of one request, with all pages checked after each step."""
    name = f"{len(ids_of(asked)) if isinstance(asked, mp.Prompt) else len(asked)}"
    cache = CacheOptions(**options)
    add(of, Request(request_id=name, prompt=asked, params=greedy(new, logprobs=0), cache=cache))
    done = []
    while of.busy:
        done += [output for output in of.step() if output.finished]
        of.check_integrity()
    (output,) = done
    assert output.error is None
    return output


def first_logprob(output: Any) -> float:
    return float(output.completions[0].logprobs[0].logprob)


def close(one: Any, other: Any, rounding: float = 1e-5) -> bool:
    alike = zip(one.completions[0].logprobs, other.completions[0].logprobs, strict=True)
    return tokens(one) == tokens(other) and all(abs(a.logprob - b.logprob) < rounding for a, b in alike)
