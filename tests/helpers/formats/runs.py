"""Kept tokens: what methods and number formats write through `generate`, and in an engine's deterministic mode.

Prompts are chosen so that every token is the likeliest by far: processors that round differently write the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

import torch

import millpond as mp
from millpond.engine.outputs import RequestOutput
from tests.helpers.formats.engine_files import asked
from tests.helpers.formats.model import ids, model, prompt

LENGTH, NEW = 100, 12
#: Tokens of a run with codes, of which processors may round one the other way.
NEW_OF_CODES = 6
#: Method, budget, number format, options of the method.
RUNS: dict[str, tuple[str, int | None, str, dict[str, Any]]] = {
    "full": ("full", None, "auto", {}),
    "h2o": ("h2o", 40, "auto", {}),
    "snapkv": ("snapkv", 40, "auto", {"window": 8}),
    "pyramidkv": ("pyramidkv", 40, "auto", {}),
    "streaming": ("streaming", 40, "auto", {}),
    "d2o": ("d2o", 40, "auto", {}),
    "kvmerger": ("kvmerger", 40, "auto", {}),
    "rotated4": ("full", None, "rotated4", {}),
    "h2o-int8": ("h2o", 80, "int8", {}),
}
#: Two prompts begin with as many tokens.
SHARED = 272


def _new(codec: str) -> int:
    return NEW if codec == "auto" else NEW_OF_CODES


@torch.no_grad()
def generated(name: str, seed: int) -> tuple[dict[str, Any], float]:
    """What `generate` writes, and the least margin of its tokens."""
    method, budget, codec, options = RUNS[name]
    call: Any = model()
    text = ids(LENGTH, seed)
    with mp.compress(call, method, budget, codec, page_slots=8, **options) as cache:
        out = call.generate(
            text,
            cache=cache,
            attention_mask=torch.ones_like(text),
            do_sample=False,
            max_new_tokens=_new(codec),
            output_logits=True,
            return_dict_in_generate=True,
        )
        entries = [len(row) for layer in (0, 1) for row in cache.positions(layer)]
    tokens = out.sequences[0, LENGTH:].tolist()
    scores = torch.cat(out.logits).log_softmax(1)
    logprobs = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    best = scores.topk(2).values
    found = {"seed": seed, "tokens": tokens, "logprobs": logprobs, "entries": entries}
    return found, float((best[:, 0] - best[:, 1]).min())


def deterministic(name: str, seed: int) -> tuple[dict[str, Any], float]:
    """What an engine in its deterministic mode writes behind two prompts at a time."""
    method, budget, codec, options = RUNS[name]
    prompts = [prompt(LENGTH, seed), prompt(LENGTH // 2, seed + 1000)]
    with mp.LLM(
        model(), method=method, budget=budget, codec=codec, options=options, page_slots=8, deterministic=True
    ) as llm:
        outputs = llm.generate(prompts, asked(_new(codec)))
    return _outputs(seed, outputs)


def shared(seed: int) -> tuple[dict[str, Any], float]:
    """What two prompts with one beginning give, one after the other, in an engine that shares it."""
    beginning = prompt(SHARED, seed)
    with mp.LLM(model(), method="full", page_slots=16, deterministic=True, prefix_cache=True) as llm:
        outputs = [llm.generate([[*beginning, *prompt(9, seed + n)]], asked(NEW))[0] for n in (1, 2)]
        taken = llm.stats().shared_tokens
    found, margin = _outputs(seed, outputs)
    return found | {"shared": taken}, margin


def _outputs(seed: int, outputs: list[RequestOutput]) -> tuple[dict[str, Any], float]:
    scored = [output.completions[0].logprobs or () for output in outputs]
    tokens = [[one.token_id for one in scores] for scores in scored]
    logprobs = [[one.logprob for one in scores] for scores in scored]
    margin = min(one.top[0][1] - one.top[1][1] for scores in scored for one in scores)
    return {"seed": seed, "tokens": tokens, "logprobs": logprobs}, margin


def bits(kept: dict[str, Any]) -> Iterator[str]:
    """A line for each kept run: its name, and a hash of the bits of all log probabilities as they are here.

    To be compared before and after a change, on one machine.
    """
    for name, found in runs(kept).items():
        flat = torch.tensor(found["logprobs"], dtype=torch.float64).flatten().tolist()
        yield f"{name} {hashlib.sha256(struct.pack(f'{len(flat)}d', *flat)).hexdigest()[:16]}"


def runs(kept: dict[str, Any]) -> dict[str, Any]:
    """All runs, of the seeds that were kept."""
    found = {f"generate {name}": generated(name, kept[f"generate {name}"]["seed"])[0] for name in RUNS}
    found |= {f"engine {name}": deterministic(name, kept[f"engine {name}"]["seed"])[0] for name in RUNS}
    return found | {"shared beginning": shared(kept["shared beginning"]["seed"])[0]}
