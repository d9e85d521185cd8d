"""One answer of 100,000 tokens on an engine with overflow="rolling": bytes and time of its steps as it grows.

A random model of two layers whose context holds 512 tokens: what is measured is the cache, not what is said.

    python benchmarks/quality/endless_answer.py --tokens 100000 --codec int4 --out benchmarks/results/endless-answer.md
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams

CONTEXT, BUDGET, PROMPT = 512, 256, 700


def model() -> LlamaForCausalLM:
    """A random model."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=CONTEXT,
            eos_token_id=None,
        )
    ).eval()


def measure(method: str, codec: str, tokens: int, every: int) -> list[tuple[int, int, float, float]]:
    """Rows of (tokens so far, bytes of keys and values, CPU time of a step in ms, entries per KV head)."""
    engine = Engine(model(), method=method, codec=codec, budget=BUDGET, overflow="rolling")
    prompt = tuple(3 + (7 * i) % 90 for i in range(PROMPT))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    engine.add(Request(request_id="endless", prompt=prompt, params=params))
    rows, n, began = [], 0, time.process_time()
    while engine.busy:
        for output in engine.step():
            answer = output.completions[0]
            if output.error is not None:
                raise output.error
            n = len(answer.token_ids)
            if n and n % every == 0 and answer.kv is not None:
                took = time.process_time() - began
                rows.append((n, answer.kv.kv_bytes, 1000 * took / every, answer.kv.held))
                print(*rows[-1], flush=True)
                began = time.process_time()
    assert n == tokens, f"{n} of {tokens} tokens"
    engine.check_integrity()
    engine.close()
    return rows


def page(method: str, codec: str, rows: list[tuple[int, int, float, float]]) -> str:
    """The rows as Markdown."""
    lines = [
        f"# One answer of {rows[-1][0]:,} tokens through a context of {CONTEXT}",
        "",
        f"`{method}`, `{codec}`, {BUDGET} entries per KV head, a prompt of {PROMPT} tokens; a random model of two "
        "layers. CPU time is that of the process, so other jobs on the machine change it little.",
        "",
        "| tokens | entries per KV head | bytes of keys and values | CPU ms per token |",
        "|---:|---:|---:|---:|",
        *(f"| {n:,} | {held:.0f} | {n_bytes:,} | {ms:.2f} |" for n, n_bytes, ms, held in rows),
        "",
        "Made by `benchmarks/quality/endless_answer.py`.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="h2o")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args()
    found = page(asked.method, asked.codec, measure(asked.method, asked.codec, asked.tokens, asked.every))
    if asked.out is not None:
        asked.out.write_text(found, encoding="utf-8")
