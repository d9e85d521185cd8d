"""Many requests through `millpond-vllm serve` over HTTP: aborts, preemption, shared prefixes, settings of their own.

    python packages/millpond-vllm/benchmarks/soak.py MODEL --requests 1000 --out soak.json

Afterwards no block is held, none that was packed has a hash (the engine checks it in every step), and requests that
keep everything have the tokens of a server without millpond.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

STOCK = "import sys; from millpond_vllm.compat import run_serve; run_serve(sys.argv[1:])"
#: Settings of requests, with their shares; None leaves them out.
SETTINGS: list[tuple[dict[str, Any] | None, int]] = [
    (None, 4),
    ({"millpond_budget": "none"}, 2),
    ({"millpond_budget": "50%", "millpond_keep": [0, 40]}, 2),
    ({"millpond_budget": 128, "millpond_sinks": 2}, 1),
    ({"millpond_budget": "30%", "millpond_recent": 64}, 1),
]


@dataclass
class Load:
    """A request of the load.

    Attributes:
        prompt: Token ids.
        extra: Its settings; None for the engine's.
        abort_after: Pieces of its stream after which the client disconnects; None if it stays.
    """

    prompt: list[int]
    extra: dict[str, Any] | None
    abort_after: int | None


@dataclass
class Result:
    """What came of the load.

    Attributes:
        status: Requests by what became of them.
        tokens: Tokens of each request that ended, by its index.
        figures: Sums of the figures of requests.
        seconds: Time that all of them took.
    """

    status: Counter[str] = field(default_factory=Counter)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    figures: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def load_of(args: argparse.Namespace) -> list[Load]:
    """Return the requests: 30 % begin with one of four texts of 128 to 192 tokens."""
    draw = random.Random(args.seed)
    vocabulary = range(100, args.vocabulary)
    shared = [draw.choices(vocabulary, k=draw.randrange(128, 192)) for _ in range(4)]
    found = []
    for _ in range(args.requests):
        length = draw.randrange(args.shortest, args.longest + 1)
        begin = draw.choice(shared) if draw.random() < args.shared else []
        prompt = (begin + draw.choices(vocabulary, k=length))[:length]
        kinds, shares = zip(*SETTINGS, strict=True)
        extra = draw.choices(kinds, weights=shares)[0]
        abort = draw.randrange(0, args.new_tokens // 2) if draw.random() < args.aborts else None
        found.append(Load(prompt, extra, abort))
    return found


@contextmanager
def server(args: argparse.Namespace, own: list[str], log: Path, port: int) -> Iterator[str]:
    """Start a server of vLLM, and yield its address."""
    command = [sys.executable, *own, args.model, "--port", str(port), "--dtype", args.dtype]
    command += ["--max-model-len", str(args.longest + args.new_tokens), "--block-size", str(args.block_size)]
    command += ["--num-gpu-blocks-override", str(args.blocks), "--enforce-eager", "--served-model-name", "soak"]
    environment = {**os.environ, "MILLPOND_VLLM_CHECK_BLOCKS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        begin = time.monotonic()
        while not _is_up(address):
            if process.poll() is not None or time.monotonic() - begin > 900:
                raise SystemExit(f"the server did not start; see {log}")
            time.sleep(1)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


async def run(address: str, load: dict[int, Load], args: argparse.Namespace) -> Result:
    """Send all requests, some at once, and return what came of them."""
    result, gate = Result(), asyncio.Semaphore(args.at_once)
    begin = time.monotonic()
    async with httpx.AsyncClient(base_url=address, timeout=1800) as client:

        async def one(index: int, request: Load) -> None:
            async with gate:
                body = {
                    "model": "soak",
                    "prompt": request.prompt,
                    "max_tokens": args.new_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                    **({} if request.extra is None else {"vllm_xargs": request.extra}),
                }
                if request.abort_after is not None:
                    await _abort(client, body, request.abort_after)
                    result.status["aborted"] += 1
                    return
                answer = await client.post("/v1/completions", json=body)
                result.status[str(answer.status_code)] += 1
                if answer.status_code == 200:
                    given = answer.json()
                    result.tokens[index] = given["choices"][0]["token_ids"]
                    figures = (given["kv_transfer_params"] or {}).get("millpond", {})
                    result.figures.update({name: n for name, n in figures.items() if isinstance(n, int)})
            done = sum(result.status.values())
            if done % 50 == 0:
                print(f"{done} of {len(load)} after {time.monotonic() - begin:.0f} s", flush=True)

        await asyncio.gather(*(one(*item) for item in load.items()))
    result.seconds = time.monotonic() - begin
    return result


async def _abort(client: httpx.AsyncClient, body: dict[str, Any], after: int) -> None:
    """Close the connection of a stream after some pieces."""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        pieces = 0
        async for line in answer.aiter_lines():
            pieces += line.startswith("data:")
            if pieces > after:
                return


def metrics(address: str) -> dict[str, float]:
    """Return the metrics that tell of blocks, of a server that has nothing to do."""
    body = {"model": "soak", "prompt": [100], "max_tokens": 1}
    httpx.post(
        f"{address}/v1/completions", json=body, timeout=300
    ).raise_for_status()  # the gauges are of its last step
    time.sleep(2)
    text = httpx.get(f"{address}/metrics", timeout=30).text
    names = r"vllm:(?:num_requests_\w+|kv_cache_usage_perc|num_preemptions_total|prefix_cache_\w+_total)"
    wanted = rf"^({names}|millpond_vllm_\w+_total)\{{[^}}]*\}} (\S+)$"
    return {name: float(value) for name, value in re.findall(wanted, text, re.M)}


def main() -> None:
    """Run the load through both servers, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=200)
    parser.add_argument("--longest", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--aborts", type=float, default=0.1)
    parser.add_argument("--shared", type=float, default=0.3)
    parser.add_argument(
        "--blocks", type=int, default=90, help="blocks of the pool: few, so that requests are preempted"
    )
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=40000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--method", default="snapkv")
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8321)
    parser.add_argument("--out", type=Path, default=Path("soak.json"))
    args = parser.parse_args()
    load = dict(enumerate(load_of(args)))
    own = ["-m", "millpond_vllm", "serve", "--method", args.method, "--budget", args.budget]
    with server(args, own, args.out.with_suffix(".log"), args.port) as address:
        result = asyncio.run(run(address, load, args))
        after = metrics(address)
    whole = {index: one for index, one in load.items() if one.extra == {"millpond_budget": "none"}}
    whole = {index: one for index, one in whole.items() if one.abort_after is None}
    with server(args, ["-c", STOCK], args.out.with_suffix(".stock.log"), args.port + 1) as address:
        stock = asyncio.run(run(address, whole, args))
    different = [index for index in whole if stock.tokens[index] != result.tokens.get(index)]
    checks = {
        "all requests ended": sum(result.status.values()) == len(load) and set(result.status) <= {"200", "aborted"},
        "no request runs": after["vllm:num_requests_running"] == 0,
        "no block is held": after["vllm:kv_cache_usage_perc"] == 0,
        "requests were preempted": after["vllm:num_preemptions_total"] > 0,
        "requests evicted": after["millpond_vllm_requests_evicted_total"] > 0,
        "requests that keep everything have the tokens of stock": not different,
    }
    options = {name: value for name, value in vars(args).items() if name not in ("out", "model")}
    found = {
        "options": options,
        "status": result.status,
        "figures": result.figures,
        "seconds": round(result.seconds, 1),
        "metrics": after,
        "compared_with_stock": len(whole),
        "different": {index: {"stock": stock.tokens[index], "here": result.tokens.get(index)} for index in different},
        "checks": checks,
    }
    args.out.write_text(json.dumps(found, indent=1))
    print(json.dumps({name: value for name, value in found.items() if name != "different"}, indent=1))
    sys.exit(0 if all(checks.values()) else 1)


if __name__ == "__main__":
    main()
