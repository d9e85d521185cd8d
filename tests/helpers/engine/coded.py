"""Engines with a storage codec and tiny models, and requests to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import millpond as mp
from millpond.codec.transform.transform_file import ModelTransform
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.hf.calibration.transform import calibrate_transform
from tests.helpers.engine.sessions import model
from tests.helpers.hf.transform import ids, tiny, transform_of_tiny

CODEC = "transform:1.5"


def engine_of(kind: str = "gqa", **options: Any) -> Engine:
    """An engine of a tiny model that keeps no prompts; "wide": one whose heads are wide enough for packed pages."""
    given = {"method": "full", "codec": "auto", "storage_codec": CODEC, "prefix_cache": False} | options
    if given["storage_codec"] is not None:
        given.setdefault("calibration", transform_of_wide() if kind == "wide" else transform_of_tiny(kind))
    return Engine(model() if kind == "wide" else tiny(kind), **given)


@cache
def transform_of_wide() -> ModelTransform:
    return calibrate_transform(model(), [ids(512, seed) for seed in range(1, 9)], length=512)


def prompt(n: int, seed: int = 0) -> list[int]:
    return [int(token) for token in ids(n, seed)]


def asked(name: str, words: Sequence[int], new: int = 24, known: Sequence[int] = (), **options: Any) -> Request:
    """A greedy request with the likeliest token at each step; known: tokens that its answer has, whatever is likely."""
    chosen = {"n": 1} | {key: options.pop(key) for key in ("n", "prompt_logprobs") if key in options}
    params = mp.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, logprobs=1, **chosen)
    return Request(
        request_id=name,
        prompt=tuple(words),
        params=params,
        known=(tuple(known),) * chosen["n"] if known else (),
        **options,
    )


def run(engine: Engine, until: int | None = None) -> dict[str, RequestOutput]:
    """Step to the end, or until the first answer of some request has so many tokens; the last outputs by name."""
    found: dict[str, RequestOutput] = {}
    while engine.busy:
        for output in engine.step():
            found[output.request_id] = output
        engine.check_integrity()
        if until is not None and any(len(one.completions[0].token_ids) >= until for one in found.values()):
            break
    return found


def answer(output: RequestOutput, index: int = 0) -> list[int]:
    if output.error is not None:
        raise output.error
    return list(output.completions[index].token_ids)


def first_choices(output: RequestOutput, index: int = 0) -> list[int]:
    """The likeliest token at each step of an answer."""
    if output.error is not None:
        raise output.error
    return [one.top[0][0] for one in output.completions[index].logprobs or ()]


def agreement(one: Sequence[int], other: Sequence[int]) -> float:
    assert len(one) == len(other)
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)
