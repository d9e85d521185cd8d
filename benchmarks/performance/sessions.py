"""First token of a conversation's next turn after a restart: from its stored session, and reading everything again.

Usage: python benchmarks/performance/sessions.py [--sessions 20] [--turns 10] [--begin 128] [--user 48] [--answer 16]
    [--method h2o] [--budget 20%] [--codec int4] [--disk 2GiB] [--threads 1] [--tiny] [--folder DIR]
    [--phase both|store|measure] [--rounds N] [--json FILE]

A random Llama of 168M parameters, bf16, or a tiny one. Phase "store": an engine goes through all conversations, whose
turns run together, and is closed. Phase "measure", which may run later on the same --folder: another engine goes on
from turns of several lengths, each with `user` new tokens, one request at a time, and right after it an engine without
sessions reads the same prompt. Each pair is one ratio of seconds from arrival to first token; the interval of the
median is a bootstrap over pairs. The file cache of the system is warm. "Cap" is whether all files together were at most
--disk after each turn. The mark of the model is made when the engine opens and is no part of a time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from script import begin, interval, keep

import millpond as mp
from millpond.budget import parse_bytes
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond_lab.bench.common.report import markdown_table


def words(n: int, *seed: int) -> list[int]:
    """Tokens of a user."""
    draw = random.Random(repr(seed))
    return [draw.randrange(3, 500) for _ in range(n)]


def run(engine: Engine, prompts: dict[str, list[int]], new: int) -> dict[str, Any]:
    """What each prompt comes to, all together."""
    params = mp.SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    for name, ids in prompts.items():
        engine.add(Request(request_id=name, prompt=tuple(ids), params=params))
    return {output.request_id: output for output in engine.drain()}


def nbytes(folder: Path) -> int:
    """Bytes of all files of turns."""
    return sum(path.stat().st_size for path in folder.glob("*/*/*"))


def store(args: argparse.Namespace, engine: Engine, folder: Path) -> dict[str, Any]:
    """Go through all conversations, and write their texts next to the turns."""
    texts = {str(n): words(args.begin, n) for n in range(args.sessions)}
    most, began = 0, time.perf_counter()
    for turn in range(args.turns):
        done = run(engine, texts, args.answer)
        for name, output in done.items():
            texts[name] += [*output.completions[0].token_ids, *words(args.user, turn, int(name))]
        assert engine.sessions is not None
        assert engine.sessions.wait(600)
        most = max(most, nbytes(folder))
        print(f"turn {turn}: {most:,} bytes, {time.perf_counter() - began:.0f} s", flush=True)
    (folder / "texts").write_text("\n".join(" ".join(map(str, ids)) for ids in texts.values()), encoding="ascii")
    stats = engine.stats().sessions
    assert stats is not None
    return {
        "turns": stats.stored,
        "most_bytes": most,
        "cap": parse_bytes(args.disk),
        "cap_kept": most <= stats.disk_limit,
        "evicted": stats.evicted,
        "dropped": stats.dropped,
    }


def first_token(engine: Engine, ids: list[int]) -> tuple[float, int]:
    """Seconds from the arrival of a prompt to its first token, and how many of its tokens a session had read."""
    output = run(engine, {"x": ids}, 1)["x"]
    kv = output.completions[0].kv
    assert output.times.first_token is not None
    assert kv is not None
    return output.times.first_token - output.times.arrived, kv.restored_tokens


def measure(args: argparse.Namespace, again: Engine, plain: Engine, folder: Path) -> list[dict[str, Any]]:
    """One row for each length: pairs of a turn that goes on, and the same prompt read as a whole."""
    texts = [[int(i) for i in line.split()] for line in (folder / "texts").read_text(encoding="ascii").splitlines()]
    first_token(plain, words(args.begin, 10**6))
    first_token(again, words(args.begin, 10**6))  # memory and threads are there now
    turns = sorted({1, *range(2, args.turns + 1, 2), args.turns})
    pairs: dict[int, list[tuple[float, float]]] = {turn: [] for turn in turns}
    for round_ in range(args.rounds or args.sessions):
        ids, turn = texts[round_ % len(texts)], turns[round_ % len(turns)]
        length = args.begin + turn * args.answer + (turn - 1) * args.user
        prompt = ids[:length] + words(args.user, 10**7, round_)
        seconds, restored = first_token(again, prompt)
        assert restored == length - 1, f"{restored} of {length} tokens came from a session"
        pairs[turn].append((seconds, first_token(plain, prompt)[0]))
        print(turn, len(prompt), pairs[turn][-1], flush=True)
    rows = []
    for turn, found in pairs.items():
        if not found:
            continue
        ratios = [one / other for one, other in found]
        low, high = interval(ratios)
        rows.append(
            {
                "turn": turn + 1,
                "prompt": args.begin + turn * (args.answer + args.user),
                "pairs": len(found),
                "session_s": statistics.median(one for one, _ in found),
                "again_s": statistics.median(other for _, other in found),
                "ratio": statistics.median(ratios),
                "low": low,
                "high": high,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("sessions", 20), ("turns", 10), ("begin", 128), ("user", 48), ("answer", 16), ("rounds", 0)):
        parser.add_argument(f"--{name}", type=int, default=number)
    for name, text in (("method", "h2o"), ("budget", "20%"), ("codec", "int4"), ("disk", "2GiB")):
        parser.add_argument(f"--{name}", default=text)
    parser.add_argument("--phase", choices=["both", "store", "measure"], default="both")
    parser.add_argument("--folder", type=Path)
    args, shape = begin(parser)
    model = shape.build()
    chosen = {
        "method": args.method,
        "budget": None if args.method == "full" else args.budget,
        "codec": args.codec,
        "max_step_tokens": 512,
    }
    stored: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.phase != "measure":
            engine = Engine(model, cache_dir=folder, cache_disk=args.disk, **chosen)
            stored = store(args, engine, folder)
            engine.close()
            print(stored)
        if args.phase != "store":
            again = Engine(model, cache_dir=folder, cache_disk=args.disk, **chosen)
            # one model has one engine's attention at a time, and the other is of equal weights
            plain = Engine(shape.build(), **chosen)
            rows = measure(args, again, plain, folder)
            stored["bytes_after"] = nbytes(folder)
            for one in (again, plain):
                one.close()
    args.folder = None  # a path of one machine
    keep(args, rows, stored=stored)
    print(
        markdown_table(
            ["turn", "prompt", "pairs", "session, ms", "read again, ms", "ratio", "95 %"],
            [
                [
                    str(r["turn"]),
                    str(r["prompt"]),
                    str(r["pairs"]),
                    f"{1e3 * r['session_s']:.0f}",
                    f"{1e3 * r['again_s']:.0f}",
                    f"{r['ratio']:.3f}",
                    f"{r['low']:.3f} to {r['high']:.3f}",
                ]
                for r in rows
            ],
        )
    )


if __name__ == "__main__":
    main()
