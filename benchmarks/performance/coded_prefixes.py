"""Prefix cache with and without a storage codec over a trace whose prompts begin alike: blocks held, tokens spared.

Usage: python benchmarks/performance/coded_prefixes.py MODEL --trace mooncake_conversation.jsonl --text FILE
    [--calibration FILE] [--codecs none transform:1.5] [--dtype auto] [--requests 200] [--cut 6144] [--share 0.1]
    [--running 2] [--new 8] [--threads 1] [--json FILE]

Lines of the trace have `hash_ids`, one for each 512 tokens of a prompt; equal ones stand for equal tokens, which are
taken from the text here. The requests are those of the first texts, by their second hash, that come more than once, in
the order of the trace; prompts are cut. Memory is
`share` of what all distinct blocks of the prompts take as pages, besides a whole prompt for each running request.
Requests run `running` at a time in the order of the trace, in one engine after the other. "Held" are the blocks in
memory at the end, in pages or as codes; "coded" is the share of these with codes once nothing is in use and the delay
is over; CPU seconds are those of the process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from script import begin, keep

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.hf.calibration.texts import tokens_of
from millpond_lab.bench.common.report import markdown_table

#: Tokens for which a hash of the trace stands.
HASHED = 512


def prompts_of(args: argparse.Namespace, text: list[int]) -> list[list[int]]:
    """Prompts of the requests, as token ids."""
    lines = [json.loads(line)["hash_ids"] for line in args.trace.read_text().splitlines()]
    turns = Counter(ids[1] for ids in lines if len(ids) > 1)
    texts: set[int] = set()
    for number in dict.fromkeys(ids[1] for ids in lines if len(ids) > 1 and turns[ids[1]] > 1):
        if sum(turns[one] for one in texts) >= args.requests:
            break
        texts.add(number)
    chosen = [ids for ids in lines if len(ids) > 1 and ids[1] in texts][: args.requests]
    places = range(0, len(text) - HASHED, HASHED // 4)

    def tokens(number: int) -> list[int]:
        place = places[number * 7919 % len(places)]
        return text[place : place + HASHED]

    return [[token for number in ids for token in tokens(number)][: args.cut] for ids in chosen]


def distinct_blocks(prompts: list[list[int]], slots: int) -> int:
    """Blocks of all prompts, equal beginnings once."""
    return len({tuple(ids[:end]) for ids in prompts for end in range(slots, len(ids) + 1, slots)})


def run(engine: Engine, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """What an engine does with all prompts, a few at a time."""
    params = mp.SamplingParams(max_tokens=args.new, temperature=0, ignore_eos=True)
    waiting = [Request(request_id=f"{n}", prompt=tuple(ids), params=params) for n, ids in enumerate(prompts)][::-1]
    spared = decoded = running = 0
    steps: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    while waiting or engine.busy:
        while waiting and running < args.running:
            engine.add(waiting.pop())
            running += 1
        step = time.perf_counter()
        for output in engine.step():
            if output.finished:
                kv = output.completions[0].kv
                assert kv is not None, "it has run"
                spared, decoded, running = spared + kv.shared_tokens, decoded + kv.decoded_tokens, running - 1
        steps.append(time.perf_counter() - step)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    until = time.perf_counter() + 60
    while engine.idle_s is not None and time.perf_counter() < until:
        time.sleep(min(engine.idle_s, 0.1))
        engine.tidy()
    prefix = engine.stats().prefix
    assert prefix is not None, "prompts are kept"
    engine.check_integrity()
    return {
        "held": prefix.blocks,
        "coded": round(prefix.coded_blocks / prefix.blocks, 3),
        "evicted": prefix.evicted,
        "spared": round(spared / sum(map(len, prompts)), 3),
        "decoded": round(decoded / sum(map(len, prompts)), 3),
        "seconds": round(seconds, 1),
        "cpu": round(cpu, 1),
        "step p99": round(sorted(steps)[int(0.99 * len(steps))], 3),
        "encode": round(prefix.encode_s, 1),
        "decode": round(prefix.decode_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", help="Transform file; without it the one that is shipped for the model.")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--codecs", nargs="+", default=["none", "transform:1.5"])
    parser.add_argument("--dtype", default="auto", help="Of the model; f32 is faster on a CPU that has no bf16.")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--cut", type=int, default=6144)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--running", type=int, default=2)
    parser.add_argument("--new", type=int, default=8)
    args, _ = begin(parser)
    model, tokenizer = mp.load_model(args.model, args.dtype), mp.load_tokenizer(args.model)
    text = tokens_of(tokenizer, args.text.read_text()[:3_000_000]).flatten().tolist()
    prompts = prompts_of(args, text)
    results: list[dict[str, Any]] = []
    for codec in args.codecs:
        options: dict[str, Any] = {} if codec == "none" else {"storage_codec": codec, "calibration": args.calibration}
        sizes = Engine(model, method="full", codec="auto")
        layers, slots = sizes.layers, sizes.config.page_slots
        sizes.close()
        numbers = sum(layer.n_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
        block = slots * (numbers * model.dtype.itemsize + 8 * sum(layer.n_kv_heads for layer in layers))
        memory = int(args.share * distinct_blocks(prompts, slots) * block)
        memory += args.running * ((args.cut + args.new) // slots + 2) * block
        engine = Engine(model, method="full", codec="auto", kv_memory=memory, prefix_cache=True, **options)
        results.append({"codec": codec, "memory": memory, **run(engine, prompts, args)})
        engine.close()
        print(results[-1], flush=True)
    names = list(results[0])
    print(markdown_table(names, [[str(row[name]) for name in names] for row in results]))
    keep(args, results, blocks=distinct_blocks(prompts, slots))


if __name__ == "__main__":
    main()
