"""Tokens a second end to end on the 8B shape: requests arrive, their prompts are read, their answers are written.

A sample of a long run: as many requests as 30 GB for caches hold decode, and some end and others arrive, evenly, as
often as answers of that length end while so many run. The prompts of those are distinct and really read; the caches of
the others are copies of one prompt's. A whole wave has no copies: all requests arrive at once and end.
The bound is what the same engine takes for the prompts alone, one after another, and for the steps without prompts.
"""

from __future__ import annotations

import statistics
from functools import partial

from gpu_bench import WARM, Bench, Shape, add_prompt, decode_alike, read_prompt, step, timed
from gpu_bounds import prompt_flop, read_weight_bytes
from gpu_engine import STEADY_BYTES
from gpu_rows import Cell, Row
from gpu_settings import H2O, Given, steady_settings

from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput

#: Tokens of a prompt, and of answers.
PROMPT, ANSWERS = 8192, (256, 2048)
#: Requests that arrive in a sample, steps without arrivals that are timed, and prompts that are read alone.
ARRIVALS, PLAIN_STEPS, ALONE = 8, 24, 3


def served_cells(bench: Bench, first: int = 0, last: int | None = None) -> list[Cell]:
    """Samples of some of the settings, in their order."""
    prompt, answers = (48, (8, 16)) if bench.machine.tiny else (PROMPT, ANSWERS)
    return [
        Cell("served", f"{name}, + {new}", partial(sampled, bench, given, prompt, new), 10.0 + new / 200)
        for new in answers
        for name, given in list(steady_settings().items())[first:last]
    ]


def wave_cells(bench: Bench) -> list[Cell]:
    """Whole waves of the shorter answers."""
    prompt, new = (48, 8) if bench.machine.tiny else (PROMPT, ANSWERS[0])
    settings = steady_settings()
    return [
        Cell("served", f"{name}, + {new}, whole wave", partial(whole_wave, bench, settings[name], prompt, new), seconds)
        for name, seconds in (("full", 25.0), (H2O, 70.0))
    ]


def limit_of(bench: Bench) -> int:
    """Bytes of all caches."""
    return 4 * 2**20 if bench.machine.tiny else STEADY_BYTES


def sampled(bench: Bench, given: Given, prompt: int, new: int) -> Row:
    """Tokens a second of a sample, and of its bound."""
    n = bench.most_running(given, (prompt, new), limit_of(bench))
    most, plain = (2, 3) if bench.machine.tiny else (ARRIVALS, PLAIN_STEPS)
    arrivals = max(1, min(most, n // 2))
    between = new / n  # steps from one arrival to the next
    longest = WARM + 2 * plain + 4 * round(arrivals * between) + 16 * (arrivals + 1)
    with bench.engine(given, n + 1) as engine:
        prompt_s = read_alone(bench, engine, prompt)
        held = decode_alike(bench, engine, Shape(n - arrivals, prompt), longest)
        for number in range(arrivals):  # those that end when others arrive
            add_prompt(engine, f"first {number}", bench.prompt(prompt, number + 1), longest)
        until_all_decode(engine, {f"first {number}" for number in range(arrivals)})
        for _ in range(WARM):
            step(engine)
        times = [timed(bench.machine, partial(step, engine)) for _ in range(plain)]
        before = engine.stats().generated_tokens
        spent, steps = serve(bench, engine, prompt, arrivals, between, longest)
        written = engine.stats().generated_tokens - before
        times += [timed(bench.machine, partial(step, engine)) for _ in range(plain)]
    row = served_row(bench, n, (prompt, new), held, (prompt_s, statistics.median(times)), (arrivals, steps))
    return row | {
        "requests": n,
        "tokens_per_s": written / spent,
        "bound_tokens_per_s": written / row["bound_s"],
        "roofline_tokens_per_s": written / row["roofline_s"],
        "share_of_bound": row["bound_s"] / spent,
        "projected": f"a sample of {arrivals} arrivals, other caches copies of one prompt's",
    }


def serve(bench: Bench, engine: Engine, prompt: int, arrivals: int, between: float, longest: int) -> tuple[float, int]:
    """Let a request end and another arrive every `between` steps.

    Returns:
        Seconds until so many steps are over and the last one decodes, and the steps.
    """
    arrived, steps, seconds, waiting = 0, 0, 0.0, set[str]()
    while steps < arrivals * between or waiting or arrived < arrivals:
        while arrived < arrivals and arrived * between <= steps:
            engine.cancel(f"first {arrived}")
            add_prompt(engine, f"arrival {arrived}", bench.prompt(prompt, arrivals + arrived + 1), longest)
            waiting.add(f"arrival {arrived}")
            arrived += 1
        found: list[RequestOutput] = []
        seconds += timed(bench.machine, lambda: found.extend(step(engine)))  # noqa: B023 - runs at once
        steps += 1
        waiting -= with_tokens(found)
    return seconds, steps


def whole_wave(bench: Bench, given: Given, prompt: int, new: int) -> Row:
    """Tokens a second of as many requests as fit, all of which arrive at once, and of its bound."""
    n = bench.most_running(given, (prompt, new), limit_of(bench))
    with bench.engine(given, n) as engine:
        prompt_s = read_alone(bench, engine, prompt)
        for number in range(n):
            add_prompt(engine, f"{number}", bench.prompt(prompt, number + 1), new)
        times, full, held = list[float](), list[float](), 0
        while engine.busy:
            found: list[RequestOutput] = []
            times.append(timed(bench.machine, lambda: found.extend(step(engine))))  # noqa: B023 - runs at once
            if len(with_tokens(found)) == n:
                full.append(times[-1])
                held = held or engine.stats().kv_bytes // n
    step_s = statistics.median(full or times)
    row = served_row(bench, n, (prompt, new), held, (prompt_s, step_s), (n, new))
    spent = sum(times)
    return row | {
        "requests": n,
        "tokens_per_s": n * new / spent,
        "bound_tokens_per_s": n * new / row["bound_s"],
        "roofline_tokens_per_s": n * new / row["roofline_s"],
        "share_of_bound": row["bound_s"] / spent,
    }


# ---------------------------------------------------------------------- parts of both


def read_alone(bench: Bench, engine: Engine, tokens: int) -> float:
    """Seconds of a prompt when nothing else runs, the median of all but the first."""
    times = [
        timed(bench.machine, partial(read_prompt, engine, f"alone {number}", bench.prompt(tokens, -number - 1)))
        for number in range(ALONE)
    ]
    return statistics.median(times[1:])


def until_all_decode(engine: Engine, names: set[str]) -> None:
    """Run steps until each of some requests has a token."""
    missing = set(names)
    while missing:
        missing -= with_tokens(step(engine))


def with_tokens(outputs: list[RequestOutput]) -> set[str]:
    """The requests that have a token."""
    return {output.request_id for output in outputs if output.completions[0].token_ids}


def served_row(
    bench: Bench, n: int, shape: tuple[int, int], held: int, took: tuple[float, float], parts: tuple[int, int]
) -> Row:
    """What prompts and steps take one after another, as measured and at the rates of the device.

    Args:
        n: requests that run together. shape: tokens of a prompt and of an answer. held: bytes of a sequence.
        took: seconds of a prompt alone, and of a step without prompts. parts: prompts and steps.
    """
    (prompts, steps), (prompt_s, step_s) = parts, took
    fastest_prompt = prompt_flop(bench.model, shape[0]) / bench.rates.flop_per_s
    fastest_step = (read_weight_bytes(bench.model) + n * held) / bench.rates.copy_bytes_per_s
    return {
        "prompt": shape[0],
        "new": shape[1],
        "limit_gb": limit_of(bench) / 1e9,
        "kv_bytes_each": held,
        "prompt_s": prompt_s,
        "step_ms": step_s * 1e3,
        "bound_s": prompts * prompt_s + steps * step_s,
        "roofline_s": prompts * fastest_prompt + steps * fastest_step,
        "bound_of": "prompts and steps one after another, as measured",
        "peak_gb": bench.machine.peak_bytes() / 1e9,
    }
