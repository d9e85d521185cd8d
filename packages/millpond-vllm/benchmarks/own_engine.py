"""The load of `eviction.py` on Millpond's own engine: the same weights, prompts and bytes for keys and values."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import AutoConfig

import millpond
from millpond.engine.request import Request


def pool_bytes(model: Path, tokens: int, width: int = 2) -> int:
    """Return the bytes of the keys and values of `tokens` tokens, whose numbers have `width` bytes."""
    config = AutoConfig.from_pretrained(model)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return tokens * 2 * width * config.num_hidden_layers * config.num_key_value_heads * dim


def run_load(
    model: Path, settings: dict[str, Any], prompts: list[list[int]], new: int, *, pool_tokens: int, chunk: int
) -> dict[str, Any]:
    """Answer the prompts; return requests at once, by steps in which others wait, and sums over the steps.

    Args:
        model: Folder of the model; its weights are bfloat16.
        settings: Method and budget.
        prompts: Ids of each prompt.
        new: Tokens of each answer.
        pool_tokens: Tokens whose keys and values fit into the memory of the caches.
        chunk: Tokens of a step.
    """
    llm = millpond.LLM(
        str(model),
        dtype="bf16",
        kv_memory=pool_bytes(model, pool_tokens),
        max_step_tokens=chunk,
        prefix_cache=False,
        **settings,
    )
    engine = llm.engine
    params = millpond.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    for index, ids in enumerate(prompts):
        engine.add(Request(request_id=str(index), prompt=tuple(ids), params=params))
    begin, cpu = time.perf_counter(), time.process_time()
    at_once, decode_tokens, decode_seconds = [], 0, 0.0
    while engine.busy:
        before, start = engine.stats(), time.perf_counter()
        for output in engine.step():
            if output.error is not None:
                raise output.error
        seconds, after = time.perf_counter() - start, engine.stats()
        if before.waiting + before.swapped:
            at_once.append(after.running + after.finished - before.finished)
        if after.prompt_tokens == before.prompt_tokens:
            decode_tokens += after.generated_tokens - before.generated_tokens
            decode_seconds += seconds
    return {
        "at_once": at_once,
        "decode_tokens": decode_tokens,
        "decode_seconds": decode_seconds,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "preempted": engine.stats().preemptions,
    }
