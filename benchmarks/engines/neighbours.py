"""Our engine and OpenVINO GenAI on two cores that other processes use too: time of prefill and of a decoding step.

    taskset -c 2,3 .venv/bin/python benchmarks/engines/neighbours.py --model smollm2-135m --out benchmarks/results

Run it with as many cores as it shall have. For every number of busy processes, each pinned on a core of its own among
them, the two engines read the same prompts in turns; a ratio is our time over OpenVINO's in the same turn.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.optional_peer import OptionalPeer
from millpond_lab.bench.common.report import markdown_table, model_phrase, write_report
from millpond_lab.bench.engines.candidates import EngineCandidate, Weights, openvino, ours
from millpond_lab.bench.generate.candidates import BenchModel, ModelShape, draw_prompts
from millpond_lab.bench.generate.saved_model import SavedModel

#: Ends with the process that started it, also where that one was killed.
BUSY = "import os; os.sched_setaffinity(0, {{{core}}}); mine = os.getppid()\nwhile os.getppid() == mine: pass"
#: Variables that change how threads wait, kept with the result.
TOLD = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MILLPOND_THREADS")
WARM_UP = 4  #: steps before the clock runs


@contextmanager
def neighbours(cores: list[int]) -> Iterator[None]:
    """A busy process on each of the cores."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY.format(core=core)]) for core in cores]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def load(
    stack: ExitStack, candidate: EngineCandidate, weights: Weights, threads: int, cell: tuple[int, int], steps: int
) -> OptionalPeer:
    """The engine's process with its model."""
    kind = candidate.kind
    child = stack.enter_context(OptionalPeer(kind.name, kind.python, kind.script, kind.made_by))
    if not child.running:
        raise SystemExit(child.note)
    settings = candidate.settings(*cell, steps)
    child.ask({"load": {"model": str(kind.model(weights)), "threads": threads, **settings}})
    return child


def turns(children: list[OptionalPeer], shape: BenchModel, cell: tuple[int, int], args: Any) -> list[dict[str, Any]]:
    """The readings of each turn: engine -> prefill in s and the median step in ms."""
    found = []
    for turn in range(-1, args.repeats):
        prompts = draw_prompts(shape, *cell, seed=turn + 1).tolist()
        reading = {}
        for child in children[:: 1 if turn % 2 else -1]:
            answer = child.ask({"prompts": prompts, "new_tokens": args.steps if turn >= 0 else WARM_UP})
            step = statistics.median(answer["steps_ms"])
            reading[child.name] = {"prefill_s": answer["prefill_s"], "decode_ms": step}
        if turn >= 0:
            found.append(reading)
    return found


def row(found: list[dict[str, Any]], ours: str, other: str) -> dict[str, Any]:
    """Medians, and the median, least and largest ratio of a turn."""
    result: dict[str, Any] = {"turns": found}
    for field in ("prefill_s", "decode_ms"):
        ratios = sorted(turn[ours][field] / turn[other][field] for turn in found)
        result[field] = {
            "ours": statistics.median(turn[ours][field] for turn in found),
            "other": statistics.median(turn[other][field] for turn in found),
            "ratio": statistics.median(ratios),
            "least": ratios[0],
            "most": ratios[-1],
        }
    return result


def markdown(data: dict[str, Any]) -> str:
    """One row per batch, threads and neighbours."""

    def cells(field: dict[str, float], digits: int) -> tuple[str, ...]:
        spread = f"{field['ratio']:.2f} ({field['least']:.2f} to {field['most']:.2f})"
        return f"{field['ours']:.{digits}f}", f"{field['other']:.{digits}f}", spread

    head = ("batch", "threads", "busy neighbours", "prefill s", "OpenVINO", "ratio", "step ms", "OpenVINO", "ratio")
    rows = [
        (str(r["batch"]), str(r["threads"]), str(r["neighbours"]), *cells(r["prefill_s"], 2), *cells(r["decode_ms"], 1))
        for r in data["results"]
    ]
    return (
        f"# On cores that other processes use\n\n{data['hardware']}. {data['software']}. {'; '.join(data['engines'])}. "
        f"`{data['command']}`, with {data['environment'] or 'no variable set'}; load average {data['load_before']:.1f} "
        f"before it. {model_phrase(data['model'])}, bfloat16, prompts of "
        f"{data['prompt']:,} tokens, {data['steps']} steps, on {data['cores']} cores; {data['repeats']} "
        "turns. Ratio: our time over OpenVINO's in the same turn, its median, least and largest; below 1 ours is "
        "faster.\n\n" + markdown_table(head, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="trained weights, as for `millpond bench engines`; default: random ones, 168M")
    parser.add_argument("--openvino", type=Path, default=Path("build/openvino/bin/python"))
    parser.add_argument("--folder", type=Path, default=Path("build/engines"))
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--threads", default="2,4")
    parser.add_argument("--neighbours", default="0,1,2")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="neighbours", help="of the result's files")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    batches, threads, busy = (
        [int(n) for n in text.split(",")] for text in (args.batches, args.threads, args.neighbours)
    )
    cores = sorted(os.sched_getaffinity(0))
    shape: BenchModel = SavedModel.of(args.model) if args.model else ModelShape()
    weights = Weights(shape, 0, args.folder)
    pair = [ours([], [], "20%")[0], openvino(args.openvino, "20%", "")[0]]
    command = " ".join(["benchmarks/engines/neighbours.py", *sys.argv[1:]])
    data: dict[str, Any] = {
        **describe_machine().header("neighbours"),
        "command": command,
        "model": shape.config(),
        "prompt": args.prompt,
        "steps": args.steps,
        "repeats": args.repeats,
        "cores": len(cores),
        "load_before": os.getloadavg()[0],
        "environment": {name: os.environ[name] for name in TOLD if name in os.environ},
        "engines": [],
        "results": [],
    }
    for batch, n in itertools.product(batches, threads):
        with ExitStack() as stack:
            cell = (batch, args.prompt)
            children = [load(stack, candidate, weights, n, cell, args.steps) for candidate in pair]
            data["engines"] = [f"{child.name}: {child.note}" for child in children]
            for count in busy:
                with neighbours(cores[:count]):
                    found = row(turns(children, shape, cell, args), *(child.name for child in children))
                data["results"].append({"batch": batch, "threads": n, "neighbours": count, **found})
                print(batch, n, count, {k: found[k] for k in ("prefill_s", "decode_ms")}, flush=True)
                write_report(args.out, args.name, data, markdown(data))


if __name__ == "__main__":
    main()
