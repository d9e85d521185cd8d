"""A closed load on the engine under several methods, with the same bytes for all caches together.

    python benchmarks/performance/engine_load.py --prompt 2048 --answer 128 --requests 12 --methods full h2o streaming

All requests are there at the start, and the pool holds `--whole` of them with a full cache. Each line tells how many
were in flight, tokens per second, and where the time went: steps that read prompts (while answers decode),
and steps that only decode. Reading costs the same under every method, so what a method can win at most is `full`'s
time over that of its steps that read. The model is the random Llama of `millpond bench generate`, with other numbers
of layers and KV heads if they are given. With memory for all requests, `--whole` as many as `--requests`, it is one
batch of the same size for all methods, and its seconds are the batch's latency.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from script import begin, keep

from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond_lab.bench.generate.candidates import draw_prompts


@dataclass(frozen=True)
class Load:
    """One method under the load. Answers are counted in tokens; `in_flight` while any request waited or ran."""

    method: str
    budget: str | None
    tokens_per_s: float
    in_flight: float  # mean over the time
    most_in_flight: int
    read_s: float
    decode_s: float
    process_s: float  # of the processor, all threads
    preemptions: int


def bear(model: Any, method: str, budget: str | None, asks: list[Request], limit: int, step_tokens: int) -> Load:
    """Run all requests to their ends."""
    engine = Engine(model, method=method, budget=budget, kv_memory=limit, max_step_tokens=step_tokens)
    for ask in asks:
        engine.add(ask)
    spent = {True: 0.0, False: 0.0}
    weighted, most, busy = 0.0, 0, time.process_time()
    while engine.busy:
        read, start = engine.stats().prompt_tokens, time.perf_counter()
        engine.step()
        took, running = time.perf_counter() - start, engine.stats().running
        spent[engine.stats().prompt_tokens > read] += took
        weighted, most = weighted + took * running, max(most, running)
    busy, stats = time.process_time() - busy, engine.stats()
    engine.close()
    total = sum(spent.values())
    return Load(
        method,
        budget,
        stats.generated_tokens / total,
        weighted / total,
        most,
        spent[True],
        spent[False],
        busy,
        stats.preemptions,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--whole", type=float, default=4, help="Requests with a full cache that the pool holds.")
    parser.add_argument("--methods", nargs="+", default=["full", "h2o", "streaming"])
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1, help="Methods take turns.")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--kv-heads", type=int)
    args, shape = begin(parser)
    given = {"layers": args.layers, "kv_heads": args.kv_heads}
    shape = replace(shape, **{name: value for name, value in given.items() if value is not None})
    model = shape.build()
    entry = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim  # bytes of a token: keys and values of two bytes
    limit = int(args.whole * 1.04 * entry * (args.prompt + args.answer + 32))  # with positions and scores
    params = SamplingParams(max_tokens=args.answer, temperature=0, ignore_eos=True)
    prompts = draw_prompts(shape, args.requests, args.prompt, seed=0).tolist()
    asks = [Request(request_id=str(i), prompt=tuple(ids), params=params) for i, ids in enumerate(prompts)]
    loads = []
    for _ in range(args.rounds):
        for method in args.methods:
            budget = None if method == "full" else args.budget
            loads.append(load := bear(model, method, budget, asks, limit, args.step_tokens))
            print(
                f"{method:10} {load.tokens_per_s:7.1f} tokens/s  in flight {load.in_flight:5.1f}, at most "
                f"{load.most_in_flight:3}  reading {load.read_s:6.1f} s  only decoding {load.decode_s:6.1f} s  "
                f"processor {load.process_s:6.1f} s  preemptions {load.preemptions}",
                flush=True,
            )
    keep(args, [asdict(load) for load in loads], kv_bytes=limit)


if __name__ == "__main__":
    main()
