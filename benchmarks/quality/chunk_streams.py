"""Streams of queries over stored chunks, first tokens with a throttled reader, and the fit of alpha.

Parts of `chunk_reuse.py`:

  zipf     queries of 3 of 24 chunks drawn by Zipf's law, with room for 8, under the rules lru and craft: tokens
           computed, and the bytes of their keys and values.
  room     300 queries of 8 of 200 chunks drawn evenly, with room for half: no further variants, those that take free
           room, and those that evict others (the paper's).
  preload  the first token of a prompt whose chunks come from files through a reader that is made as slow as a multiple
           of the time to compute; with preloading by layer, and with all layers read first.
  alpha    `millpond chunks tune-alpha` on 16 pieces of 450 characters of the text, in 6 prompts of 4.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from chunk_rows import Kept

import millpond as mp
from millpond.cache.chunks.file_format import LayerReader
from millpond.cache.chunks.store import ChunkStore
from millpond_lab.bench.chunks import Ids, queries, random_chunks
from millpond_lab.bench.common.report import markdown_table
from millpond_lab.bench.generate.candidates import TINY

GREEDY = mp.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
POOL, PICKED, HELD = 24, 3, 8  #: chunks of the Zipf queries, of each query, and that the store has room for
LOADS = (0.5, 1.0, 2.0)  #: seconds of loading, as a multiple of those of computing
BOUNDS = (0.02, 0.05)  #: on the divergence, for alpha


def model_named(name: str) -> Any:
    """The model of --model in float32."""
    return TINY.build().float() if name == "random" else mp.load_model(name, "f32")


def chunks_of(args: argparse.Namespace, count: int, seed: int) -> list[Ids]:
    """`count` chunks of --tokens tokens from places of the text; of the random model, of random tokens."""
    if args.model == "random":
        return random_chunks(count, args.tokens, TINY.vocab, seed)
    text = args.text.read_text(encoding="utf-8")[:600_000]
    ids = [int(i) for i in mp.load_tokenizer(args.model)(text, add_special_tokens=False)["input_ids"]]
    begins = random.Random(seed).sample(range(0, len(ids) - args.tokens, args.tokens), count)
    return [tuple(ids[begin : begin + args.tokens]) for begin in begins]


def bytes_per_chunk(model: Any, tokens: int) -> int:
    """Bytes of a stored chunk."""
    probe = ChunkStore(None)
    with mp.LLM(model, method="full", chunk_store=probe):
        return probe.size_of(tokens)


def computed(model: Any, make_store: Callable[[], ChunkStore], prompts: Sequence[mp.Prompt]) -> int:
    """Tokens computed for prompts, one after another, with a new store."""
    with mp.LLM(model, method="full", chunk_store=make_store()) as llm:
        for prompt in prompts:
            llm.generate(prompt, GREEDY)
        return llm.stats().prompt_tokens


def run_zipf(args: argparse.Namespace, kept: Kept) -> None:
    model = model_named(args.model)
    size = bytes_per_chunk(model, args.tokens)
    weights = [1 / (rank + 1) for rank in range(POOL)]
    per_token = size / args.tokens
    lines, sums = [], {"lru": 0, "craft": 0}

    def store(rule: str) -> ChunkStore:
        return ChunkStore(None, memory=HELD * size, rule=rule)

    for seed in range(args.seed, args.seed + args.seeds):
        *chunks, question = chunks_of(args, POOL + 1, seed)
        drawn = random.Random(seed)
        picks = [dict.fromkeys(drawn.choices(range(POOL), weights, k=PICKED)) for _ in range(args.queries)]
        prompts = [mp.Prompt([*(mp.Chunk(chunks[n]) for n in pick), question[: args.suffix]]) for pick in picks]
        found = {
            rule: kept.unit(f"{rule}, seed {seed}", partial(computed, model, partial(store, rule), prompts))
            for rule in sums
        }
        sums = {rule: sums[rule] + found[rule] for rule in sums}
        lines.append((str(seed), *(f"{found[rule]:,}" for rule in sums), f"{found['craft'] / found['lru']:.3f}"))
    lines.append(("all", *(f"{n:,}" for n in sums.values()), f"{sums['craft'] / sums['lru']:.3f}"))
    lines.append(("all, MB of keys and values", *(f"{n * per_token / 1e6:,.1f}" for n in sums.values()), ""))
    page = (
        f"# Tokens computed under Zipf queries on {args.model}\n\n{args.queries} queries of {PICKED} of {POOL} chunks "
    )
    page += f"of {args.tokens} tokens and {args.suffix} behind them for each seed; the store holds {HELD} chunks.\n\n"
    page += markdown_table(("seed", "lru", "craft", "craft / lru"), lines)
    kept.write(page, rows=[{"rule": rule, "tokens": n, "bytes": n * per_token} for rule, n in sums.items()])


class EvictingStore(ChunkStore):
    """A store whose further variants take the place of what is worth least, as the paper's."""

    def takes_further(self, share: float, n_variants: int, n_tokens: int, *, private: bool) -> bool:
        return share > self.keep_above and n_variants < self.variants

    def put(self, variant: Any, *, private: bool = False, replaces: bool = True) -> None:
        super().put(variant, private=private, replaces=True)


def run_room(args: argparse.Namespace, kept: Kept) -> None:
    pool, per_query, count = 200, 8, 300
    model = model_named(args.model)
    size = bytes_per_chunk(model, args.tokens)
    *chunks, question = chunks_of(args, pool + 1, args.seed)
    prompts = list(queries(chunks, count, per_query, question[: args.suffix], args.seed))
    whole = count * (per_query * args.tokens + args.suffix)
    stores: dict[str, Callable[[], ChunkStore]] = {
        "none": lambda: ChunkStore(None, memory=pool // 2 * size, keep_above=1),
        "in free room": lambda: ChunkStore(None, memory=pool // 2 * size),
        "evicting others": lambda: EvictingStore(None, memory=pool // 2 * size),
    }
    found = {name: kept.unit(name, partial(computed, model, make, prompts)) / whole for name, make in stores.items()}
    page = f"# Further variants in a full store on {args.model}\n\n{count} queries of {per_query} of {pool} chunks of "
    page += f"{args.tokens} tokens and {args.suffix} behind them, drawn evenly; room for {pool // 2}.\n\n"
    page += markdown_table(
        ("further variants", "tokens computed, x plain"), [(name, f"{n:.3f}") for name, n in found.items()]
    )
    kept.write(page, rows=[{"variants": name, "computed": n} for name, n in found.items()])


class Throttle:
    """A reader of layers that takes some seconds for each, and the time from its first read to its last.

    Attributes:
        pause_s: seconds of each read. begin, end: of the reads since `clear`.
    """

    def __init__(self) -> None:
        self.pause_s, self.begin, self.end = 0.0, 0.0, 0.0

    @contextmanager
    def patched(self) -> Iterator[None]:
        read = LayerReader.read

        def slow(reader: LayerReader, layer: int) -> Any:
            self.begin = self.begin or time.perf_counter()
            until = time.perf_counter() + self.pause_s
            found = read(reader, layer)
            time.sleep(max(0.0, until - time.perf_counter()))
            self.end = time.perf_counter()
            return found

        with mock.patch.object(LayerReader, "read", slow):
            yield

    def clear(self) -> None:
        self.begin = 0.0


def first_token_s(llm: mp.LLM, prompt: mp.Prompt) -> float:
    """Seconds from the arrival of a prompt to its first token, with 15 % of its chunks computed."""
    (out,) = llm.generate(prompt, GREEDY, cache=mp.CacheOptions(recompute=0.15))
    assert out.times.first_token is not None, "it has one token"
    return out.times.first_token - out.times.arrived


def run_preload(args: argparse.Namespace, kept: Kept) -> None:
    model, throttle = model_named(args.model), Throttle()
    *parts, foreign, question = chunks_of(args, args.chunks + 2, args.seed)
    prompt = mp.Prompt([*(mp.Chunk(part) for part in reversed(parts)), question[: args.suffix]])

    def measure(factor: float) -> list[dict[str, float]]:
        """Seconds of repetitions: computing alone, loading alone, and first tokens in both ways."""
        found = []
        for _ in range(args.repeats):
            throttle.pause_s = 0.0
            times = {"compute": first_token_s(in_memory, prompt)}
            throttle.pause_s = factor * times["compute"] / (n_layers * len(parts))
            for name, row_s in (("read first", 0.0), ("preloading", times["compute"] / n_rows)):
                reuse.row_s = row_s  # 0: the time to compute is not known, so that all layers are read first
                throttle.clear()
                times[name] = first_token_s(from_files, prompt)
                times[f"load, {name}"] = throttle.end - throttle.begin
            found.append(times)
        return found

    with tempfile.TemporaryDirectory() as folder, throttle.patched():
        stores = [ChunkStore(folder, memory=memory, keep_above=1) for memory in ("4GiB", 1)]
        in_memory, from_files = (mp.LLM(model, method="full", chunk_store=store) for store in stores)
        with in_memory, from_files:
            for part in parts:
                in_memory.generate(mp.Prompt([foreign, mp.Chunk(part), question[:1]]), GREEDY)
            reuse = from_files.engine._parts.chunk_reuse
            assert reuse is not None, "it has a store"
            n_layers = len(from_files.engine.layers)
            n_rows = round(0.15 * args.chunks * args.tokens) + args.suffix
            first_token_s(in_memory, prompt), first_token_s(from_files, prompt)  # warm
            found = {
                f"load {factor:g} x compute": kept.unit(f"{factor:g}", partial(measure, factor)) for factor in LOADS
            }
    lines, rows = [], []
    for name, times in found.items():
        middle = {part: statistics.median(one[part] for one in times) for part in times[0]}
        load, compute = middle["load, read first"], middle["compute"]
        longer, both = max(load, compute), load + compute
        seconds = (compute, load, middle["read first"], middle["preloading"])
        ratios = (middle["preloading"] / longer, middle["preloading"] / both)
        rows.append({"setting": name, **middle, "of_longer": ratios[0], "of_sum": ratios[1]})
        lines.append((name, *(f"{one:.3f}" for one in seconds), *(f"{one:.2f}" for one in ratios)))
    head = ("", "compute, s", "load, s", "first token, all read first", "preloading", "x the longer", "x the sum")
    page = (
        f"# First token with a throttled reader on {args.model}\n\n{args.chunks} chunks of {args.tokens} tokens from "
    )
    page += f"files and {args.suffix} behind them, 15 % computed, float32, {args.threads} threads; medians of "
    page += f"{args.repeats}.\n\n{markdown_table(head, lines)}"
    kept.write(page, rows=rows)


def run_alpha(args: argparse.Namespace, kept: Kept) -> None:
    text = args.text.read_text(encoding="utf-8")
    step = (len(text) - 450) // 16
    pieces = [text[begin : begin + 450] for begin in range(0, 16 * step, step)]
    model, tokenizer = model_named(args.model), mp.load_tokenizer(args.model)

    def fit(bound: float) -> dict[str, Any]:
        with mp.LLM(
            model, tokenizer=tokenizer, method="full", chunk_store=ChunkStore(None, memory="4GiB", keep_above=1)
        ) as llm:
            found = llm.tune_alpha(pieces, bound, prompts=6, chunks=4)
        return {"alpha": found.best.alpha, "trials": [[one.alpha, one.kl, one.share] for one in found.trials]}

    found = {f"{bound:g} nats": kept.unit(f"{bound:g} nats", partial(fit, bound)) for bound in BOUNDS}
    lines = [
        (name, f"{alpha:g}" + (" (found)" if alpha == one["alpha"] else ""), f"{max(kl, 0):.4f}", f"{share:.1%}")
        for name, one in found.items()
        for alpha, kl, share in one["trials"]
    ]
    page = f"# Fit of alpha on {args.model}\n\n16 pieces of 450 characters of `{args.text.name}`, evenly spaced, in 6 "
    page += "prompts of 4.\n\n" + markdown_table(("bound", "alpha", "KL, nats", "of the chunks computed"), lines)
    kept.write(page, rows=[{"bound": name, "alpha": one["alpha"]} for name, one in found.items()])


STREAMS: dict[str, Callable[[argparse.Namespace, Kept], None]] = {
    "zipf": run_zipf,
    "room": run_room,
    "preload": run_preload,
    "alpha": run_alpha,
}
