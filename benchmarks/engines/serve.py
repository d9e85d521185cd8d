"""Our server and llama.cpp's on one GGUF file under one load, with equal bytes for caches: goodput in service levels.

    benchmarks/engines/llamacpp_server.sh
    python benchmarks/engines/serve.py --trace agents:TRACES/miniswe --users 6 --requests 66 --entries 8192 \
        --slo ttft=5,tpot=0.1 --out benchmarks/results

Each candidate has a fresh server process with as many threads, is warmed up, and then sent the load by the client of
`millpond bench serve`. What was measured before under the same load stays in the result; `--only` adds candidates and
rounds to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table, write_report
from millpond_lab.bench.generate.saved_model import SavedModel
from millpond_lab.bench.serve.requests import TRACES, LoadRequest, TokenBlocks
from millpond_lab.bench.serve.run import LoadPlan, parse_levels, run
from millpond_lab.evals.harness.summary import wilson

READY_S = 120.0  #: that a server may take until it answers
#: Bytes of llama.cpp's cache types for a value.
CACHE_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}


@dataclass(frozen=True)
class Limits:
    """What both servers are given: entries in 16 bits, their bytes, threads, and entries of the longest request."""

    entries: int
    bytes: int
    threads: int
    longest: int
    users: int


def ours(gguf: Path, limits: Limits, *options: str) -> list[str]:
    """Our server; its limit counts pages of requests and of prefixes that are kept."""
    command = [str(Path(sys.executable).with_name("millpond")), "serve", "--model", str(gguf), "--dtype", "bf16"]
    return [*command, "--kv-memory", f"{limits.bytes}B", "--threads", str(limits.threads), *options]


def llama(server: Path, gguf: Path, limits: Limits, cache: str = "f16", unified: bool = False) -> list[str]:
    """llama.cpp's server: slots as long as the longest request, as many as there are bytes and users for.

    A slot keeps its last prompt for requests that begin alike. The store of prompts in the host's memory is off: its
    bytes would be beyond the limit.
    """
    entries = int(limits.entries * CACHE_BYTES["f16"] / CACHE_BYTES[cache])
    slots = limits.users if unified else max(1, min(limits.users, entries // limits.longest))
    return [
        str(server),
        "-m",
        str(gguf),
        "-c",
        str(entries // 256 * 256),
        "-np",
        str(slots),
        "-t",
        str(limits.threads),
        "-tb",
        str(limits.threads),
        "-fa",
        "on",
        "-ctk",
        cache,
        "-ctv",
        cache,
        "--cache-ram",
        "0",
        "--no-webui",
        "--metrics",
        "--kv-unified" if unified else "--no-kv-unified",
    ]


def commands(args: Any, gguf: Path, limits: Limits) -> dict[str, list[str]]:
    """The command of each candidate's server, without host and port."""
    evicting = ("--method", "h2o", "--budget", "20%", "--codec", "int4")
    wide = widened(args.llama, gguf, args.folder)
    return {
        "millpond, full": ours(gguf, limits, "--method", "full"),
        "millpond, h2o 20 % + int4": ours(gguf, limits, *evicting),
        "millpond, full, int4 weights": ours(gguf, limits, "--method", "full", "--weights", "int4"),
        "millpond, h2o 20 % + int4, int4 weights": ours(gguf, limits, *evicting, "--weights", "int4"),
        "llama.cpp, bf16 weights": llama(args.llama, wide, limits),
        "llama.cpp, bf16 weights, shared cache": llama(args.llama, wide, limits, unified=True),
        "llama.cpp, the file": llama(args.llama, gguf, limits),
        "llama.cpp, the file, shared cache": llama(args.llama, gguf, limits, unified=True),
        "llama.cpp, the file, q4_0 cache": llama(args.llama, gguf, limits, "q4_0"),
    }


def widened(server: Path, gguf: Path, folder: Path) -> Path:
    """The file with its matrices in bfloat16, by llama.cpp's own program; made once."""
    target = folder / f"{gguf.stem}-bf16.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        program = server.with_name("llama-quantize")
        subprocess.run([program, "--allow-requantize", gguf, part, "BF16"], check=True, capture_output=True)
        part.rename(target)
    return target


@contextmanager
def running(command: list[str], log: Path) -> Iterator[tuple[str, int]]:
    """The server's address and process id, once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdout=file, stderr=file)
        try:
            wait_until_ready(url, process, log)
            yield url, process.pid
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Ask /health until it answers 200."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    lines = log.read_text(errors="replace").strip().splitlines()[-5:]
    raise SystemExit("the server did not get ready; its last lines:\n" + "\n".join(lines))


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(command: list[str], plan: dict[str, Any], asks: Sequence[LoadRequest], log: Path) -> dict[str, Any]:
    """One round: the summary under the load, and the server's own figures."""
    with running(command, log) as (url, pid):
        warm = [LoadRequest(0.0, TokenBlocks(((10**6 + i, 300),)), 8) for i in range(2)]
        asyncio.run(run(LoadPlan(url=url, **{**plan, "rate": None, "users": 1}), warm))
        data = asyncio.run(run(LoadPlan(url=url, **plan), asks))
        peak = peak_bytes(pid)
    times = [[r["sent_s"], r["first_s"], r["ended_s"], r["output_tokens"]] for r in data["requests"]]
    details = sorted({r["detail"] for r in data["requests"] if r["failure"]})[:3]
    return {**data["summary"], "server": data["server"], "peak_bytes": peak, "failure_texts": details, "times": times}


def row(name: str, rounds: list[dict[str, Any]]) -> tuple[str, ...]:
    """Medians over the rounds; the share within the levels over all their requests, with its interval."""

    def middle(field: str, part: str | None = None) -> float:
        values = [r[field] if part is None else (r[field] or {}).get(part, float("nan")) for r in rounds]
        return statistics.median(values)

    sent = sum(r["sent"] for r in rounds)
    share = sum(r["attained_jointly"] * r["sent"] for r in rounds) / sent
    low, high = wilson(share, sent).low, wilson(share, sent).high
    goodput = " ".join(f"{r['goodput_per_s']:.2f}" for r in rounds)
    return (
        name,
        goodput,
        f"{share:.0%} [{low:.0%}, {high:.0%}]",
        f"{sum(r['failed'] for r in rounds)} of {sent}",
        f"{middle('ttft_s', 'p50'):.2f}",
        f"{middle('ttft_s', 'p90'):.2f}",
        f"{middle('tpot_s', 'p50') * 1e3:.0f}",
        f"{middle('tpot_s', 'p90') * 1e3:.0f}",
        f"{middle('output_tokens_per_s'):.1f}",
        f"{middle('prompt_tokens'):,.0f}",
        f"{middle('peak_bytes') / 1e6:.0f}",
    )


HEAD = (
    "server",
    "goodput requests/s, by round",
    "share within the levels",
    "failed",
    "TTFT s, median",
    "90 %",
    "TPOT ms, median",
    "90 %",
    "output tokens/s",
    "prompt tokens",
    "peak MB",
)


def markdown(data: dict[str, Any]) -> str:
    """A section per load."""
    parts = [
        f"# Servers on one file\n\n{data['hardware']}. {data['software']}. {data['llama_version']}. "
        f"{data['file']}, sha256 {data['sha256']}; our bf16 weights and llama.cpp's are made from it.\n",
        "Share within the levels: of all requests of all rounds, with Wilson's interval of 95 %, which does not count "
        "that requests of a round wait for each other. Goodput: requests within all levels per second. Other columns "
        "are medians of the rounds. TTFT: time to the first token; TPOT: time per token after it. Peak: resident "
        "memory of the server.\n",
    ]
    for text, load in data["loads"].items():
        levels = ", ".join(f"{name} <= {seconds:g} s" for name, seconds in load["levels"].items())
        rows = [row(name, rounds) for name, rounds in load["results"].items()]
        parts += [
            f"## {text}\n",
            f"{load['asks']} requests, the longest {load['longest']:,} tokens with its answer; {levels}; "
            f"{load['bytes'] / 1e6:.1f} MB for caches ({load['entries']:,} entries in 16 bits); {load['threads']} "
            f"threads. `{load['command']}`\n",
            markdown_table(HEAD, rows),
            "\n".join(f"* {name}: `{load['commands'][name]}`" for name in load["results"]) + "\n",
        ]
    return "\n".join(parts)


def load_of(args: Any, gguf_folder: Path) -> tuple[list[LoadRequest], int]:
    """The requests, and the tokens of the longest one with its answer."""
    from transformers import AutoTokenizer

    kind, _, path = args.trace.partition(":")
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder)
    asks, longest = [], 0
    for ask in (ask.shrunk(args.shrink) for ask in TRACES[kind](Path(path))):
        prompt = len(tokenizer(ask.prompt).input_ids) if isinstance(ask.prompt, str) else ask.prompt.length
        if prompt + ask.output_tokens < args.longest:
            asks.append(ask)
            longest = max(longest, prompt + ask.output_tokens)
        if len(asks) == args.requests:
            break
    return asks, longest


def told(text: str, args: Any) -> str:
    """A command without this machine's folders."""
    for folder in (args.llama.parent, args.folder, Path(sys.executable).parent):
        text = text.replace(f"{folder}/", "")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file, or a name of 'millpond models'")
    parser.add_argument("--llama", type=Path, default=Path("build/llama-server/bin/llama-server"))
    parser.add_argument("--folder", type=Path, default=Path("build/engines"), help="of converted weights and logs")
    parser.add_argument("--trace", required=True, metavar="KIND:PATH", help="as for `millpond bench serve`")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--longest", type=int, default=4096, help="leave out what is longer with its answer, in tokens")
    parser.add_argument("--users", type=int, help="closed loop")
    parser.add_argument("--rate", type=float, help="open loop, Poisson arrivals per second")
    parser.add_argument("--slots", type=int, default=8, help="of llama.cpp at most, in an open loop")
    parser.add_argument("--entries", type=int, default=8192, help="of all caches, as entries in 16 bits")
    parser.add_argument("--slo", default="ttft=5,tpot=0.1")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", help="names of candidates, separated by semicolons")
    parser.add_argument("--name", default="serve", help="of the result's files")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if (args.users is None) == (args.rate is None):
        parser.error("give --users (closed loop) or --rate (open loop)")
    saved = SavedModel.of(args.model)
    if saved.gguf is None:
        parser.error(f"--model {args.model}: no GGUF file belongs to it")
    config = AutoConfig.from_pretrained(saved.folder)
    entry = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    asks, longest = load_of(args, saved.folder)
    limits = Limits(args.entries, args.entries * entry, args.threads, longest, args.users or args.slots)
    found = commands(args, saved.gguf, limits)
    chosen = args.only.split(";") if args.only else list(found)
    if unknown := [name for name in chosen if name not in found]:
        parser.error(f"--only: no candidate {unknown[0]!r}; there are: {'; '.join(found)}")
    levels = parse_levels(args.slo)
    plan = {
        "rate": args.rate,
        "users": args.users,
        "vocab_size": config.vocab_size,
        "levels": levels,
        "timeout_s": 300.0,
    }
    text = f"{args.trace.partition(':')[0]} {Path(args.trace).name}, answers and made-up prompts / {args.shrink}, " + (
        f"{args.users} users" if args.users else f"{args.rate:g} requests/s"
    )
    file = args.out / f"{args.name}.json"
    data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"loads": {}}
    version = subprocess.run([args.llama, "--version"], capture_output=True, text=True, check=True)
    data |= {
        **describe_machine().header("serve"),
        "llama_version": (version.stderr + version.stdout).splitlines()[0],
        "file": saved.gguf.name,
        "sha256": file_sha256(saved.gguf),
    }
    load = data["loads"].setdefault(f"{text}, {args.entries:,} entries", {"results": {}, "commands": {}})
    load |= {
        "asks": len(asks),
        "longest": longest,
        "levels": levels,
        "bytes": limits.bytes,
        "entries": args.entries,
        "threads": args.threads,
        "command": shlex.join(["benchmarks/engines/serve.py", *told_arguments(args)]),
    }
    for turn in range(args.rounds):
        for name in chosen[:: -1 if turn % 2 else 1]:
            result = measure(found[name], plan, asks, args.folder / f"{args.name}.log")
            load["results"].setdefault(name, []).append(result)
            load["commands"][name] = told(shlex.join(found[name]).replace(str(saved.gguf), saved.gguf.name), args)
            print(" | ".join(row(name, [result])), result["failures"], result["failure_texts"], flush=True)
            write_report(args.out, args.name, data, markdown(data))


def told_arguments(args: Any) -> list[str]:
    """The arguments of this load, without folders."""
    kind, _, path = args.trace.partition(":")
    how = ["--users", str(args.users)] if args.users else ["--rate", f"{args.rate:g}"]
    return [
        "--model",
        Path(args.model).name,
        "--trace",
        f"{kind}:{Path(path).name}",
        *how,
        "--requests",
        str(args.requests),
        "--shrink",
        str(args.shrink),
        "--entries",
        str(args.entries),
        "--slo",
        args.slo,
    ]


def file_sha256(path: Path) -> str:
    """In hexadecimal digits."""
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
