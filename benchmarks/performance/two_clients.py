"""How long a short request waits behind many long ones of another client, and of its own.

    python benchmarks/performance/two_clients.py --prompts 40 --length 3500 --short 20 --answer 20

Each line is one run: the short request alone; of another client than the long ones, while there is memory for all of
them, for four, and for one; and of the same client, where it goes behind them. `first_s` and `all_s` count from the
moment at which it is given to the engine, half a second after the long ones.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import asdict, dataclass

from script import begin, keep

from millpond.engine.async_llm import AsyncLLM
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams


@dataclass(frozen=True)
class Wait:
    """One run: memory for a number of long requests (0: no limit), and how long the short one waited."""

    run: str
    room_for: int
    first_s: float
    all_s: float
    preemptions: int
    others_done: int


async def measure(args: argparse.Namespace, run: str, room_for: int, client: str | None) -> Wait:
    """The short request, of a `client` that is "many" as the long ones or another; None: alone."""
    probe = AsyncLLM(args.model, method=args.method, budget=args.budget, threads=args.threads)
    draw = random.Random(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(draw.randrange(2, probe.vocab_size) for _ in range(n))

    longs = [ids(args.length) for _ in range(args.prompts if client else 0)]
    limit = None
    if room_for:
        need = await probe.call(lambda engine: need_of(engine, args.length, args.answer))
        limit = need * room_for
    await probe.close()
    llm = AsyncLLM(args.model, method=args.method, budget=args.budget, threads=args.threads, kv_memory=limit)
    done = 0

    async def ask(name: str, prompt: tuple[int, ...], who: str) -> tuple[float, float]:
        nonlocal done
        start, first = time.perf_counter(), 0.0
        params = SamplingParams(max_tokens=args.answer, temperature=0, ignore_eos=True)
        async for output in llm.stream(Request(request_id=name, prompt=prompt, params=params, client=who)):
            if not first and output.completions[0].token_ids:
                first = time.perf_counter() - start
        done += 1
        return first, time.perf_counter() - start

    await ask("warm", ids(args.short), "warm")
    done = 0
    others = [asyncio.create_task(ask(str(n), prompt, "many")) for n, prompt in enumerate(longs)]
    await asyncio.sleep(0.5)
    first, whole = await ask("short", ids(args.short), client or "one")
    found = Wait(run, room_for, first, whole, llm.stats().preemptions, done - 1)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await llm.close(drain=False)
    return found


def need_of(engine: object, prompt: int, answer: int) -> int:
    """Bytes that a request of this length is given."""
    from millpond.engine.memory_estimate import estimate
    from millpond.engine.request import CacheOptions

    cache_factory = engine._parts.decode_groups.group(CacheOptions()).cache_factory  # type: ignore[attr-defined]
    return estimate(cache_factory, prompt, answer, 1).peak(1)


def main() -> None:
    """Run it, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pond-text-long")
    parser.add_argument("--method", default="full")
    parser.add_argument("--budget")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--length", type=int, default=3500)
    parser.add_argument("--short", type=int, default=20)
    parser.add_argument("--answer", type=int, default=20)
    args, _ = begin(parser)
    behind = [("another client", room_for, "one") for room_for in (0, 4, 1)]
    runs = [("alone", 0, None), *behind, ("the same client", 0, "many")]
    results = []
    for run, room_for, client in runs:
        found = asyncio.run(measure(args, run, room_for, client))
        results.append(found)
        memory = f"memory for {room_for}" if room_for else "no limit"
        print(
            f"{run:16} {memory:13} first token {found.first_s:7.3f} s, all {found.all_s:7.3f} s, "
            f"preempted {found.preemptions}, others done {found.others_done}",
            flush=True,
        )
    keep(args, [asdict(found) for found in results])


if __name__ == "__main__":
    main()
