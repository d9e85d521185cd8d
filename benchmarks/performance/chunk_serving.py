"""Retrieved chunks under a load: computed whole, with a prefix cache, with a chunk store, and with both.

    python benchmarks/performance/chunk_serving.py TEXT --threads 1 [--in-flight 8] [--json benchmarks/results/...]

Requests have a common system prompt, a few chunks that are drawn by Zipf's law (of as many that about `--repeated` of
all that are retrieved were retrieved before), and a question of their own; as many as `--in-flight` are in the engine
at any time. Each way runs the same stream on a new engine, in random order. Tokens computed have no noise; seconds are
those of the processor, also those from a request's arrival to its first and its last token. "same" is the share of
first tokens that are those of the plain way. Cache-Craft (arXiv:2502.15734) is the paper. A run goes on from the rows
that the file of --json has.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from itertools import accumulate, count
from pathlib import Path
from typing import Any

from script import GrowingRows, begin

import millpond as mp
from millpond.cache.chunks.store import ChunkStore
from millpond.engine.prompts import requests_of
from millpond_lab.bench.chunks import Ids, random_chunks

#: Name -> whether there is a chunk store, and a prefix cache.
WAYS = {"plain": (False, False), "prefix": (False, True), "chunks": (True, False), "both": (True, True)}


def zipf_picks(queries: int, picked: int, repeated: float, seed: int) -> list[list[int]]:
    """Chunks of each query, different ones, of the fewest with which at most `repeated` of all were there before."""
    for pool in count(picked):
        drawn, weights = random.Random(seed), list(accumulate(1 / (rank + 1) for rank in range(pool)))
        picks: list[list[int]] = []
        for _ in range(queries):
            pick: dict[int, None] = {}
            while len(pick) < picked:
                pick[drawn.choices(range(pool), cum_weights=weights)[0]] = None
            picks.append(list(pick))
        if repeated_share(picks) <= repeated:
            return picks
    raise AssertionError("a pool has no end")


def repeated_share(picks: list[list[int]]) -> float:
    """Share of what is retrieved that was retrieved before."""
    return 1 - len({chunk for pick in picks for chunk in pick}) / sum(map(len, picks))


def serve(model: Any, way: str, prompts: list[tuple[Ids, list[Ids], Ids]], args: argparse.Namespace) -> dict[str, Any]:
    """One way over all requests: tokens computed, CPU seconds, latencies, and each first token."""
    chunked, kept = WAYS[way]
    store = ChunkStore(None, memory="4GiB") if chunked else None
    params = mp.SamplingParams(max_tokens=args.new, temperature=0, ignore_eos=True)
    names, arrived, first, ended = count(), dict[str, float](), dict[str, float](), dict[str, float]()
    tokens: dict[str, int] = {}
    waiting = iter(prompts)
    with mp.LLM(model, method="full", prefix_cache=kept, chunk_store=store) as llm:
        began = time.process_time()
        while len(ended) < len(prompts):
            while len(arrived) - len(ended) < args.in_flight and (parts := next(waiting, None)) is not None:
                system, chunks, question = parts
                joined = [part for each in (system, *chunks, question) for part in each]
                prompt = mp.Prompt([system, *map(mp.Chunk, chunks), question]) if chunked else joined
                (request,) = requests_of(prompt, params, None, names)
                arrived[request.request_id] = time.process_time()
                llm.engine.add(request)
            for output in llm.engine.step():
                now, ids = time.process_time(), output.completions[0].token_ids
                if ids and output.request_id not in first:
                    first[output.request_id], tokens[output.request_id] = now, ids[0]
                if output.finished:
                    assert output.error is None, output.error
                    ended[output.request_id] = now
        seconds, read = time.process_time() - began, llm.stats().prompt_tokens
    return {
        "read": read,
        "cpu_s": seconds,
        "latency": statistics.fmean(ended[name] - arrived[name] for name in ended),
        "first": statistics.fmean(first[name] - arrived[name] for name in first),
        "tokens": [tokens[str(number)] for number in range(len(prompts))],
    }


def stream(args: argparse.Namespace, ids: Ids | None, vocab: int) -> tuple[list[tuple[Ids, list[Ids], Ids]], float]:
    """System prompt, chunks and question of each request, and the share of chunks that are repeated."""
    picks = zipf_picks(args.queries, args.picked, args.repeated, args.seed)
    n_chunks = 1 + max(chunk for pick in picks for chunk in pick)
    lengths = [args.system, *[args.tokens] * n_chunks, *[args.question] * args.queries]
    if ids is None:
        parts = [random_chunks(1, length, vocab, args.seed + n)[0] for n, length in enumerate(lengths)]
    else:
        begins = random.Random(args.seed).sample(range(0, len(ids) - args.tokens, args.tokens), len(lengths))
        parts = [ids[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]
    system, chunks, questions = parts[0], parts[1 : 1 + n_chunks], parts[1 + n_chunks :]
    asked = [(system, [chunks[n] for n in pick], question) for pick, question in zip(picks, questions, strict=True)]
    return asked, repeated_share(picks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path, nargs="?", help="Of the chunks; without one they are of random tokens.")
    parser.add_argument("--model", default="smollm2-135m")
    sizes = (("queries", 24), ("picked", 3), ("tokens", 64), ("system", 64), ("question", 16), ("new", 8))
    for name, value in (*sizes, ("in-flight", 8), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeated", type=float, default=0.75, help="Share of retrieved chunks.")
    args, shape = begin(parser)
    model, ids = (shape.build(), None) if args.tiny else (mp.load_model(args.model, "bf16"), None)
    if args.text is not None:
        text = args.text.read_text(encoding="utf-8")[:600_000]
        ids = tuple(int(i) for i in mp.load_tokenizer(args.model)(text, add_special_tokens=False)["input_ids"])
    names = ("queries", "picked", "tokens", "system", "question", "new", "repeated", "threads", "tiny")
    load = {name: getattr(args, name) for name in names} | {"model": "" if args.tiny else args.model}
    rows = GrowingRows(args.json, load | {"text": args.text and args.text.name}, "in_flight", "seed", "way")
    for seed in range(args.seeds):
        args.seed = seed
        prompts, repeated = stream(args, ids, shape.vocab)
        whole = sum(len(system) + sum(map(len, chunks)) + len(question) for system, chunks, question in prompts)
        missing = [way for way in WAYS if not rows.has(args.in_flight, seed, way)]
        found = {way: serve(model, way, prompts, args) for way in random.Random(seed).sample(missing, len(missing))}
        plain = found["plain"]["tokens"] if "plain" in found else None
        for way, one in found.items():
            row: dict[str, Any] = {"in_flight": args.in_flight, "seed": seed, "way": way, "whole": whole}
            same = plain and statistics.fmean(a == b for a, b in zip(one.pop("tokens"), plain, strict=True))
            rows.add(row | {"repeated": repeated, **one, "same": same})


if __name__ == "__main__":
    main()
