"""Steps of a request that decodes, while blocks of other prompts are coded and decoded beside it.

Usage: python benchmarks/performance/coded_steps.py MODEL --text FILE [--codec transform:1.5] [--prompts 4]
    [--tokens 1024] [--rounds 3] [--threads 1] [--json FILE]

Two engines, with a storage codec and without one, run the same steps in turns. In each round both read new prompts;
then one request decodes while the blocks of these wait to be coded ("coding"), and while other prompts that begin with
them are added, one after the other ("hits"). Only steps that decode and read nothing count. "own" are CPU seconds of
the engine's thread, which include copies and writes of pages and no wait; "clock" includes the other threads' use of
cores and of Python's lock, and that of other processes. Ratios are of the engines' medians, by round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, sleep, thread_time
from typing import Any

from script import begin, keep

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import Request

#: Steps that are measured of each phase, at least.
STEPS = 40
Times = list[tuple[float, float]]


def request(name: str, prompt: Sequence[int], new: int) -> Request:
    params = mp.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    return Request(request_id=name, prompt=tuple(prompt), params=params)


def step(engine: Engine, times: Times) -> None:
    """Run a step; it counts where it reads no prompt."""
    kinds: list[bool] = []
    engine.on_step = lambda planned, _: kinds.append(bool(planned.decodes) and not planned.prefills)
    own, clock = thread_time(), perf_counter()
    engine.step()
    if kinds == [True]:
        times.append((thread_time() - own, perf_counter() - clock))


def a_round(engines: dict[str, Engine], prompts: list[list[int]], nth: int) -> dict[str, dict[str, Times]]:
    found: dict[str, dict[str, Times]] = {name: {"coding": [], "hits": []} for name in engines}
    for engine in engines.values():
        for number, prompt in enumerate(prompts):
            engine.add(request(f"{nth} {number}", prompt, 1))
        engine.drain()
        engine.add(request(f"{nth} decodes", prompts[0][:64][::-1], 1000))
    for _ in range(STEPS):
        for name, engine in engines.items():
            step(engine, found[name]["coding"])
    coded = engines["codec"]
    for _ in range(2000):  # all that is due
        prefix = coded.stats().prefix
        if prefix is None or not prefix.waiting_blocks:
            break
        step(coded, found["codec"]["coding"])
        sleep(0.001)
    for number, prompt in enumerate(prompts):
        for engine in engines.values():
            engine.add(request(f"{nth} hit {number}", [*prompt[:-40], *prompt[:8]], 1))
        for _ in range(STEPS // 2):
            for name, engine in engines.items():
                step(engine, found[name]["hits"])
    for engine in engines.values():
        engine.cancel(f"{nth} decodes")
        engine.drain()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--codec", default="transform:1.5")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args, _ = begin(parser)
    model, tokenizer = mp.load_model(args.model, "bf16"), mp.load_tokenizer(args.model)
    text = tokenizer(args.text.read_text()[:2_000_000])["input_ids"]
    options: dict[str, Any] = {"method": "full", "codec": "auto", "prefix_cache": True}
    engines = {"none": Engine(model, **options)}
    engines["codec"] = Engine(model, storage_codec=args.codec, storage_delay_s=0.0, **options)
    rounds, at = [], 0
    for nth in range(args.rounds):
        prompts = [text[at + n * args.tokens : at + (n + 1) * args.tokens] for n in range(args.prompts)]
        at += args.prompts * args.tokens
        rounds.append(a_round(engines, prompts, nth))
    prefix = engines["codec"].stats().prefix
    assert prefix is not None, "prompts are kept"
    results: list[dict[str, Any]] = []
    for phase in ("coding", "hits"):
        for n, clock in enumerate(("own", "clock")):
            medians = {
                name: [statistics.median(one[n] for one in found[name][phase]) for found in rounds] for name in engines
            }
            ratios = [with_ / without for with_, without in zip(medians["codec"], medians["none"], strict=True)]
            row = {"phase": phase, "seconds": clock, "ratio": statistics.median(ratios)}
            row |= {f"ms {name}": 1e3 * statistics.median(of) for name, of in medians.items()}
            row |= {f"p90 ms {name}": 1e3 * quantile(rounds, name, phase, n) for name in engines}
            results.append(row)
            print(row, flush=True)
    keep(args, results, encoded=prefix.encoded, decoded=prefix.decoded)
    for engine in engines.values():
        engine.close()


def quantile(rounds: list[dict[str, dict[str, Times]]], name: str, phase: str, n: int) -> float:
    """The ninth tenth of all steps of a phase."""
    times = sorted(one[n] for found in rounds for one in found[name][phase])
    return times[int(0.9 * len(times))]


if __name__ == "__main__":
    main()
