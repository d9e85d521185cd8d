"""CPU time and peak memory of loading a model: a cache on it, an engine, a server, each in a fresh process.

    python benchmarks/performance/loading.py MODEL [--runs 3] [--tokens 20] [--most-s S] [--most-mb MB] [--json FILE]

Of the cache and the engine, `imports` are those of Millpond, torch and transformers, the model's own classes among
them, and `loading` is what follows until the first token could be computed. Of the server `loading` is all that it
took until it answered, imports too. CPU seconds are those of all threads; other jobs on the machine lengthen them.
The peak is the highest resident memory of the process since it began, behind that many tokens. A GGUF file is
converted before. Medians over the runs, which take turns. With --most-s and --most-mb the exit status is 1 where the
engine takes more.
"""

from __future__ import annotations

import time

BEGAN = time.process_time()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import urllib.error  # noqa: E402
import urllib.request  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import transformers  # noqa: E402
from script import keep  # noqa: E402
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name  # noqa: E402

from millpond import LLM, SamplingParams, compress  # noqa: E402
from millpond.models.load import load_model, load_tokenizer, resolve  # noqa: E402

PROMPT = "The pond lies behind the mill, and"
#: Seconds in which a server must answer.
READY_S = 120.0


def opened_cache(model: str) -> Callable[[int], object]:
    loaded: Any = load_model(model)
    tokenizer: Any = load_tokenizer(model)
    cache = compress(loaded, "full")
    ids = tokenizer(PROMPT, return_tensors="pt")
    return lambda n: loaded.generate(**ids, past_key_values=cache, max_new_tokens=n, min_new_tokens=n, do_sample=False)


def opened_engine(model: str) -> Callable[[int], object]:
    llm = LLM(model, method="full")
    return lambda n: llm.generate(PROMPT, SamplingParams(max_tokens=n, temperature=0, ignore_eos=True))


OPENED = {"compress": opened_cache, "LLM": opened_engine}


def in_this_process(way: str, model: str, tokens: int) -> dict[str, float]:
    """One way, here: CPU seconds and bytes."""
    import_classes(Path(resolve(model)))
    imports, began = time.process_time() - BEGAN, time.process_time()
    generate = OPENED[way](model)
    loading = time.process_time() - began
    generate(tokens)
    return {"imports_s": imports, "loading_s": loading, "peak_bytes": peak(os.getpid())}


def import_classes(folder: Path) -> None:
    """Import the classes of a model that transformers imports at their first use."""
    config = transformers.AutoConfig.from_pretrained(folder)
    _ = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    named = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
    if named:
        tokenizer_class_from_name(named)


def served(model: str, tokens: int) -> dict[str, float]:
    """A server in a process of its own, with one request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "millpond", "serve", "--model", model, "--method", "full", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(server, f"http://127.0.0.1:{port}/health")
            loading = cpu_seconds(server.pid)
            body = {"model": "any", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
                body["model"] = json.load(answer)["data"][0]["id"]
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            urllib.request.urlopen(request).close()
            return {"imports_s": 0.0, "loading_s": loading, "peak_bytes": peak(server.pid)}
        finally:
            server.terminate()


def wait_for(server: subprocess.Popen[bytes], url: str) -> None:
    late = time.monotonic() + READY_S
    while time.monotonic() < late and server.poll() is None:
        try:
            urllib.request.urlopen(url).close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"the server ended, or did not answer in {READY_S:g} s")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all threads; of its children not."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak(pid: int) -> int:
    """Bytes of the highest resident memory of a process since it began."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--only", choices=[*OPENED, "serve"], action="append", help="May be given several times.")
    parser.add_argument("--most-s", type=float, help="CPU seconds of the engine's loading, at most.")
    parser.add_argument("--most-mb", type=float, help="MB of the engine's peak, at most.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=OPENED, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(in_this_process(args.child, args.model, args.tokens)))
        return 0
    resolve(args.model)
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(args.runs):
        for way in args.only or [*OPENED, "serve"]:
            found[way].append(served(args.model, args.tokens) if way == "serve" else in_a_child(way, args))
    rows = [
        {"way": way, **{name: statistics.median(run[name] for run in runs) for name in runs[0]}, "runs": runs}
        for way, runs in found.items()
    ]
    for row in rows:
        print(
            f"{row['way']:9} imports {row['imports_s']:5.1f} CPU s, loading {row['loading_s']:5.1f} CPU s, "
            f"peak {row['peak_bytes'] / 1e6:6.0f} MB"
        )
    keep(args, rows)
    engine: dict[str, Any] = next((row for row in rows if row["way"] == "LLM"), {"loading_s": 0, "peak_bytes": 0})
    slow = args.most_s is not None and engine["loading_s"] > args.most_s
    return int(slow or (args.most_mb is not None and engine["peak_bytes"] > args.most_mb * 1e6))


def in_a_child(way: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, args.model, "--tokens", str(args.tokens), "--child", way]
    child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    raise SystemExit(main())
