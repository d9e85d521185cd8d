"""Hit rates of vLLM's prefix cache with and without eviction: a trace with shared prefixes, and chats of several turns.

    python packages/millpond-vllm/benchmarks/hit_rates.py mooncake_conversation.jsonl --out rows.jsonl

The trace has a JSON object for each request, as Mooncake's has (FAST'25): `input_length`, `output_length` and
`hash_ids`, one for 512 tokens. A block of vLLM stands for 512 tokens here, so that a CPU can read as many requests.
What is hit depends on the blocks alone, and the model is a small one with random weights. In the chats each prompt is
the prompt before, the answer to it, and a new message.

Hits are those that vLLM counts itself. Each setting is a process of its own; rows that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

#: Settings of `engine_args` by name; None is vLLM alone.
SETTINGS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "snapkv 20%": {"method": "snapkv", "budget": "20%"},
    "snapkv 50%": {"method": "snapkv", "budget": "50%"},
    "tova 20%": {"method": "tova", "budget": "20%"},
    "tova 50%": {"method": "tova", "budget": "50%"},
    "criticalkv 20%": {"method": "criticalkv", "budget": "20%"},
    "keydiff 20%": {"method": "keydiff", "budget": "20%"},
    "streaming 20%": {"method": "streaming", "budget": "20%"},
    "h2o 20%": {"method": "h2o", "budget": "20%"},
    "h2o 50%": {"method": "h2o", "budget": "50%"},
}
#: Tokens of a block, and those of the trace for which it stands.
BLOCK, TRACED = 32, 512
VOCABULARY = 512
#: What a row is of besides its setting.
LOAD = ("load", "requests", "blocks", "at_once")


class Trace:
    """Requests of a trace in its order.

    Args:
        file: The trace.
        count: Requests that are taken.
        longest: Blocks of the longest prompt that is taken.
    """

    def __init__(self, file: Path, count: int, longest: int) -> None:
        with file.open(encoding="utf-8") as lines:
            parsed = (json.loads(line) for line in lines)
            fitting = (one for one in parsed if len(one["hash_ids"]) <= longest)
            self._requests = [*islice(enumerate(fitting), count)][::-1]

    def following(self) -> tuple[str, list[int], int] | None:
        """Return the name, prompt and length of answer of the next request; None if there is none."""
        if not self._requests:
            return None
        index, one = self._requests.pop()
        ids = [token for number in one["hash_ids"] for token in _tokens(f"block {number}", BLOCK)]
        length = -(-one["input_length"] * BLOCK // TRACED)
        return str(index), ids[:length], max(1, one["output_length"] * BLOCK // TRACED)

    def answered(self, name: str, tokens: list[int]) -> None:
        """Take an answer: the next prompts of the trace do not depend on it."""


class Chats:
    """Chats that all begin with one text; a turn follows when the one before is answered, behind those that wait.

    Args:
        count: Chats.
        turns: Turns of each.
        first: Tokens of the first message.
        later: Tokens of each later message.
        answer: Tokens of each answer.
        shared: Tokens of the text with which they begin.
    """

    def __init__(
        self, count: int, turns: int, *, first: int = 320, later: int = 120, answer: int = 96, shared: int = 128
    ) -> None:
        self.turns, self._later, self._answer = turns, later, answer
        begin = _tokens("shared", shared)
        self._texts = [begin + _tokens(f"chat {chat}", first) for chat in range(count)]
        self._waiting = deque(range(count))
        self._turn = [0] * count

    def following(self) -> tuple[str, list[int], int] | None:
        """Return the name, prompt and length of answer of the next turn; None if none can be asked now."""
        if not self._waiting:
            return None
        chat = self._waiting.popleft()
        return f"{chat} {self._turn[chat]}", list(self._texts[chat]), self._answer

    def answered(self, name: str, tokens: list[int]) -> None:
        """Take an answer, and let the next turn of its chat wait."""
        chat = int(name.split()[0])
        self._turn[chat] += 1
        if self._turn[chat] < self.turns:
            self._texts[chat] += [*tokens, *_tokens(f"chat {chat} turn {self._turn[chat]}", self._later)]
            self._waiting.append(chat)


def _tokens(name: str, count: int) -> list[int]:
    return random.Random(name).choices(range(5, VOCABULARY), k=count)


def random_model(folder: str) -> str:
    """Write a Llama of one layer with random weights, and return its path."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=16384,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measured(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Run both loads with one setting in this process; return their rows."""
    import vllm

    import millpond_vllm

    settings = SETTINGS[name]
    with tempfile.TemporaryDirectory() as folder:
        engine = vllm.LLM(
            model=random_model(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=(args.longest + 16) * BLOCK,
            block_size=BLOCK,
            num_gpu_blocks_override=args.blocks,
            max_num_batched_tokens=2048,
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=False,
            **({} if settings is None else millpond_vllm.engine_args(**settings)),
        ).llm_engine
        rows = []
        loads: dict[str, Trace | Chats] = {
            "trace": Trace(args.trace, args.requests, args.longest),
            "chats": Chats(args.chats, args.turns),
        }
        for load, requests in loads.items():
            before = counters(engine)
            count = answer_all(engine, requests, args.at_once)
            found = {key: value - before[key] for key, value in counters(engine).items()}
            rows.append({"load": load, "setting": name, "requests": count, **sizes(args), **found})
            assert engine.reset_prefix_cache(), "no block is held"
        return rows


def sizes(args: argparse.Namespace) -> dict[str, int]:
    """Return what decides how many requests share the pool."""
    return {"blocks": args.blocks, "at_once": args.at_once}


def answer_all(engine: Any, requests: Trace | Chats, at_once: int) -> int:
    """Answer all requests, some at once; return how many they were."""
    import vllm

    unfinished, count = 0, 0
    while True:
        while unfinished < at_once and (following := requests.following()) is not None:
            name, ids, answer = following
            params = vllm.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
            engine.add_request(name, {"prompt_token_ids": ids}, params)
            unfinished, count = unfinished + 1, count + 1
        if not unfinished:
            return count
        for output in engine.step():
            if output.finished:
                unfinished -= 1
                requests.answered(output.request_id, list(output.outputs[0].token_ids))


def counters(engine: Any) -> dict[str, int]:
    """Return vLLM's own counters of the prefix cache, preemptions, and the events of millpond."""
    names = {
        "vllm:prefix_cache_queries": "queries",
        "vllm:prefix_cache_hits": "hits",
        "vllm:num_preemptions": "preempted",
    }
    found = {**dict.fromkeys(names.values(), 0), "events": 0}
    for metric in engine.get_metrics():
        if metric.name in names:
            found[names[metric.name]] += int(metric.value)
    scheduler = engine.engine_core.engine_core.scheduler
    if hasattr(scheduler, "totals"):
        found["events"] = scheduler.totals.evictions.events
    return found


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none if it is not there."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def tables(rows: list[dict[str, Any]]) -> str:
    """Return a table of hit rates by setting and load, with points to vLLM alone."""
    loads = list(dict.fromkeys(tuple(row[key] for key in LOAD) for row in rows))
    heads = [
        f"{load}: {requests:,} requests, {blocks:,} blocks, {at_once} at once"
        for load, requests, blocks, at_once in loads
    ]
    lines = [f"| setting | {' | '.join(heads)} |", "|---|" + "---:|" * len(loads)]
    by_key = {(row["setting"], *(row[key] for key in LOAD)): row["hits"] / row["queries"] for row in rows}
    for name in SETTINGS:
        rates = [by_key.get((name, *load)) for load in loads]
        if all(rate is None for rate in rates):
            continue
        cells = []
        for load, rate in zip(loads, rates, strict=True):
            stock = by_key.get(("stock", *load))
            points = "" if rate is None or stock is None or name == "stock" else f" ({100 * (rate - stock):+.1f})"
            cells.append("-" if rate is None else f"{100 * rate:.1f} %{points}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is not in the file yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=48, help="blocks of a prompt; longer ones are left out")
    parser.add_argument("--chats", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=3000, help="blocks of the pool")
    parser.add_argument("--at-once", type=int, default=8, help="requests that are answered or wait at a time")
    parser.add_argument("--settings", default=";".join(SETTINGS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("ROWS " + json.dumps(measured(args, args.one)))
        return
    rows = read_rows(args.out)
    for name in args.settings.split(";"):
        alike = {"load": "trace", "setting": name, "requests": args.requests, **sizes(args)}
        if any(alike.items() <= row.items() for row in rows):
            continue
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        command = [sys.executable, *sys.argv, "--one", name]
        ran = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        made = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("ROWS "))[5:])
        rows += made
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in made)
        print(name, *(f"{row['load']}: {row['hits']} of {row['queries']}" for row in made), sep="; ", flush=True)
    print(tables(rows))


if __name__ == "__main__":
    main()
