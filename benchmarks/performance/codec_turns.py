"""Decoding through generate() in quantized formats and bf16, in turns of a few tokens on the same caches.

    python benchmarks/performance/codec_turns.py --codec int4 int8 kivi2 --prompt 4096 --rounds 24

A machine that others use too is faster now and slower a second later, by more than codecs differ. So the prompt is
read once for each codec, and then every one goes on for `--tokens` tokens with its own cache, in shuffled order, round
after round; the ratio is the median over the rounds, of whole turns (with the steps that seal a page) and of their
median steps. The model is the random Llama of `millpond bench generate`.
"""

from __future__ import annotations

import argparse
import random
import statistics
from contextlib import ExitStack
from typing import Any

import torch
from script import begin, keep
from torch import Tensor

from millpond.hf.compress import compress
from millpond.hf.stopwatch import Stopwatch
from millpond_lab.bench.generate.candidates import draw_prompts


def go_on(model: Any, text: Tensor, cache: Any, tokens: int) -> tuple[Tensor, list[float]]:
    """The text (B, n) with `tokens` greedy ones behind it, and the seconds of each step after the first."""
    watch = Stopwatch()
    text = model.generate(
        text,
        attention_mask=torch.ones_like(text),
        cache=cache,
        streamer=watch,
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        disable_compile=True,
    )
    return text, watch.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codec", nargs="+", default=["int4", "int8", "kivi2"])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=17, help="Of a turn; the step to the first is not timed.")
    parser.add_argument("--rounds", type=int, default=24)
    args, shape = begin(parser)
    model, names = shape.build(), list(dict.fromkeys(["bf16", *args.codec]))
    prompts = draw_prompts(shape, args.batch, args.prompt, seed=0)
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    rng = random.Random(0)
    with ExitStack() as stack, torch.inference_mode():
        caches = {name: stack.enter_context(compress(model, "full", codec=name)) for name in names}
        texts = {name: go_on(model, prompts, caches[name], 2)[0] for name in names}
        for _ in range(args.rounds):
            for name in rng.sample(names, len(names)):
                texts[name], steps = go_on(model, texts[name], caches[name], args.tokens)
                times[name].append(steps)
        held = {name: caches[name].stats().kv_bytes for name in names}
    results = []
    for name in names:
        pairs = list(zip(times[name], times["bf16"], strict=True))
        row = {
            "codec": name,
            "step_ms": 1e3 * statistics.median(s for steps in times[name] for s in steps),
            "of_bf16": statistics.median(sum(own) / sum(base) for own, base in pairs),
            "of_bf16_median_steps": statistics.median(statistics.median(o) / statistics.median(b) for o, b in pairs),
            "kv_bytes": held[name],
        }
        results.append(row)
        print(
            f"{name:10} {row['step_ms']:6.2f} ms a step, {row['of_bf16']:.3f} x bf16's time (median steps "
            f"{row['of_bf16_median_steps']:.3f} x), {held[name] / 1e6:.1f} MB held"
        )
    keep(args, results)


if __name__ == "__main__":
    main()
