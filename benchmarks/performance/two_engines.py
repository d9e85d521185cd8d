"""Two engines in one process, at work at once, against one after the other; and two threads that call generate().

    python benchmarks/performance/two_engines.py --model smollm2-135m --threads 2 4 --rounds 6

Each has a batch of its own: prompts, then a number of tokens. The ratio is the time of both one after the other by that
of both at once, in rounds: the median and its interval by the bootstrap; at 1, sharing the cores costs nothing.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from script import interval, keep

from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.hf.compress import compress
from millpond.models.load import load_model


class EngineWork:
    """An engine with a model of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._engine, self._args = Engine(load_model(args.model, args.dtype), method="full"), args

    def run(self, prompts: torch.Tensor) -> object:
        """The tokens of all answers."""
        params = SamplingParams(max_tokens=self._args.tokens, temperature=0.0, ignore_eos=True)
        for n, prompt in enumerate(prompts.tolist()):
            self._engine.add(Request(request_id=str(n), prompt=tuple(prompt), params=params))
        answers: dict[str, list[int]] = {}
        while len(answers) < len(prompts):
            for output in self._engine.step():
                if output.error is not None:
                    raise output.error
                if output.finished:
                    answers[output.request_id] = list(output.completions[0].token_ids)
        self._engine.drain()
        return sorted(answers.items())


class GenerateWork:
    """A model under generate()."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._model, self._args = load_model(args.model, args.dtype), args

    def run(self, prompts: torch.Tensor) -> object:
        """The tokens of all answers."""
        n = self._args.tokens
        with torch.inference_mode(), compress(self._model, "full") as cache:
            ids = self._model.generate(
                prompts, cache=cache, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0
            )
        return ids[:, prompts.shape[1] :].tolist()


def timed(jobs: list[Callable[[], object]], at_once: bool) -> tuple[float, list[object]]:
    """Seconds of all jobs, and what each returned."""
    found: list[object] = [None] * len(jobs)

    def one(i: int) -> None:
        found[i] = jobs[i]()

    begun = perf_counter()
    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
        if not at_once:
            thread.join()
    for thread in threads:
        thread.join()
    return perf_counter() - begun, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", choices=("engine", "generate"), default=["engine", "generate"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    results = []
    for kind in args.kinds:
        works = [(EngineWork if kind == "engine" else GenerateWork)(args) for _ in range(2)]
        prompts = torch.randint(1000, (2, args.batch, args.prompt), generator=torch.Generator().manual_seed(0))
        jobs = [lambda work=work, ids=ids: work.run(ids) for work, ids in zip(works, prompts, strict=True)]
        for threads in args.threads:
            torch.set_num_threads(threads)
            times: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(-1, args.rounds):  # the first round is not counted
                answers = []
                for at_once in (False, True)[:: 1 if turn % 2 else -1]:
                    taken, found = timed(jobs, at_once)
                    answers.append(found)
                    if turn >= 0:
                        times[at_once].append(taken)
                if answers[0] != answers[1]:
                    raise SystemExit("two at once answered something else than one after the other")
            ratios = [a / b for a, b in zip(times[False], times[True], strict=True)]
            row = {
                "kind": kind,
                "threads": threads,
                "one_after_the_other_s": statistics.median(times[False]),
                "at_once_s": statistics.median(times[True]),
                "ratio": statistics.median(ratios),
                "interval": interval(ratios),
            }
            results.append(row)
            print(
                f"{kind}, {threads} threads: one after the other {row['one_after_the_other_s']:.2f} s, at once "
                f"{row['at_once_s']:.2f} s, ratio {row['ratio']:.2f} [{row['interval'][0]:.2f}, "
                f"{row['interval'][1]:.2f}]",
                flush=True,
            )
    keep(args, results)


if __name__ == "__main__":
    main()
