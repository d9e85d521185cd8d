"""A pass of a few tokens behind a long cache, against a decoding step of one token.

    python benchmarks/performance/few_rows.py --model smollm2-135m --entries 4096 --batch 1 4 --rounds 24 --threads 1

Assisted and prompt-lookup generation pass a few tokens of a sequence at once. Each pass is taken back by `crop`, which
is not timed, so that all meet the same cache. Rounds hold every number of tokens once, in random order; a ratio is the
median over the rounds of the time by that of one token in the same round, with its interval by the bootstrap.
"""

from __future__ import annotations

import argparse
import random
import statistics
import warnings
from pathlib import Path
from time import perf_counter

import torch
from script import interval, keep

from millpond.hf.compress import compress
from millpond.models.load import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--entries", type=int, default=4096)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 5, 16])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model, rng, results = load_model(args.model, args.dtype), random.Random(0), []
    numbers = sorted({1, *args.tokens})
    for batch in args.batch:
        with torch.inference_mode(), compress(model, "full") as cache:
            ids = torch.randint(model.config.vocab_size, (batch, args.entries))
            model(ids, cache=cache, logits_to_keep=1)
            times: dict[int, list[float]] = {n: [] for n in numbers}
            for turn in range(-1, args.rounds):  # the first round is not counted
                for n in rng.sample(numbers, len(numbers)):
                    begun = perf_counter()
                    model(ids[:, :n], cache=cache)
                    taken = perf_counter() - begun
                    cache.crop(-n)
                    if turn >= 0:
                        times[n].append(taken)
        for n in numbers:
            ratios = [a / b for a, b in zip(times[n], times[1], strict=True)]
            row = {
                "batch": batch,
                "tokens": n,
                "ms": statistics.median(times[n]) * 1e3,
                "ms_min": min(times[n]) * 1e3,
                "ratio": statistics.median(ratios),
                "interval": interval(ratios),
            }
            results.append(row)
            print(
                f"batch {batch}, {n:2} tokens: {row['ms']:6.1f} ms (least {row['ms_min']:.1f}), "
                f"{row['ratio']:.2f} [{row['interval'][0]:.2f}, {row['interval'][1]:.2f}] of one token",
                flush=True,
            )
    keep(args, results)


if __name__ == "__main__":
    main()
