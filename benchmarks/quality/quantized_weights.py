"""Perplexity of a text, and bytes, with a model's matrices as saved, in 8 and in 4 bits.

Usage: python benchmarks/quality/quantized_weights.py TEXT [--model smollm2-135m] [--windows 4] [--tokens 1024]
    [--dtype bf16] [--step-tokens 512] [--out benchmarks/results/quantized-weights.json]

Windows of the text are read by the engine as prompts, whose log probabilities are summed; no sampling, no seed. The
interval is a bootstrap over the windows' ratios to the plain model. Blocks of a GGUF file are taken over as they are;
matrices of a folder of safetensors are quantized. Up to 32 rows of a step meet the codes themselves, and more rows
numbers that were widened from them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import millpond as mp


def loss(llm: mp.LLM, window: list[int]) -> float:
    """Mean negative log-likelihood of the tokens behind the first."""
    params = mp.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (out,) = llm.generate([window], params)
    assert out.prompt_logprobs is not None
    return -sum(one.logprob for one in out.prompt_logprobs[1:]) / (len(window) - 1)


def interval(differences: list[float], seed: int = 7) -> tuple[float, float]:
    """95 % of the mean, by a bootstrap over windows."""
    draw = random.Random(seed)
    means = sorted(sum(draw.choices(differences, k=len(differences))) / len(differences) for _ in range(2000))
    return means[50], means[1949]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtype", default="bf16", help="of rows, and of weights that are not packed")
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    ids = mp.load_tokenizer(asked.model)(asked.text.read_text(encoding="utf-8"))["input_ids"]
    windows = [ids[i * asked.tokens : (i + 1) * asked.tokens] for i in range(asked.windows)]
    losses: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    for weights in (None, "int8", "int4"):
        name = weights or "plain"
        with mp.LLM(
            asked.model, method="full", weights=weights, dtype=asked.dtype, max_step_tokens=asked.step_tokens
        ) as llm:
            losses[name], nbytes = [loss(llm, window) for window in windows], llm.stats().weight_bytes
        more = [a - b for a, b in zip(losses[name], losses["plain"], strict=True)]
        low, high = interval(more)
        rows.append(
            {
                "weights": name,
                "bytes": nbytes,
                "perplexity": math.exp(sum(losses[name]) / len(windows)),
                "more": math.expm1(sum(more) / len(more)),
                "low": math.expm1(low),
                "high": math.expm1(high),
            }
        )
        print(rows[-1])
    if asked.out is not None:
        load = {
            "model": Path(asked.model).name,
            "text": asked.text.name,
            "windows": asked.windows,
            "tokens": asked.tokens,
            "dtype": asked.dtype,
            "step_tokens": asked.step_tokens,
        }
        asked.out.write_text(json.dumps({"load": load, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
