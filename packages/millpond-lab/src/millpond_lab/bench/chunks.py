"""`bench chunks`: time to the first token by tier on a random model, and what many queries compute."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from millpond.cache.chunks.store import ChunkStore
from millpond.engine.chunks.prompt import Chunk, Prompt
from millpond.engine.llm import LLM
from millpond.engine.request import CacheOptions
from millpond.engine.sampling.params import SamplingParams
from millpond.policy.reuse import Recompute
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table, model_phrase
from millpond_lab.bench.generate.candidates import ModelShape

Ids = tuple[int, ...]


def random_chunks(count: int, tokens: int, vocab: int, seed: int) -> list[Ids]:
    """`count` chunks of `tokens` ids each, from 1 to vocab - 1."""
    rng = np.random.default_rng(seed)
    return [tuple(int(i) for i in rng.integers(1, vocab, tokens)) for _ in range(count)]


def shuffled(chunks: Sequence[Ids], suffix: Ids, seed: int) -> Prompt:
    """A prompt of all chunks in a random order, and a suffix."""
    order = np.random.default_rng(seed).permutation(len(chunks))
    return Prompt([*(Chunk(chunks[place]) for place in order), suffix])


def queries(chunks: Sequence[Ids], count: int, per_query: int, suffix: Ids, seed: int) -> Iterator[Prompt]:
    """`count` prompts of `per_query` different chunks each, all chunks being as likely, in random order."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        picked = rng.choice(len(chunks), per_query, replace=False)
        yield Prompt([*(Chunk(chunks[place]) for place in picked), suffix])


#: Where stored chunks lie, and the memory of the store then; files are in the system's cache.
TIERS: dict[str, str | int] = {"memory": "16GiB", "disk": 1}


@dataclass(frozen=True, slots=True)
class ChunkBench:
    """What is run; see `millpond bench chunks`.

    Attributes:
        chunks, tokens, suffix: number of chunks of the timed prompt, tokens of each, tokens after them.
        shares: shares that are computed again. dtype, rule: number format and eviction rule of the store.
        n_queries: queries of the steady stream; 0: no stream. per_query, pool: chunks of a query, and of the pool that
            it picks from. query_tokens: tokens of each of these. held: share of the pool that fits into the store.
    """

    chunks: int = 8
    tokens: int = 256
    suffix: int = 32
    shares: tuple[Recompute, ...] = ("auto", 0.15, 0.0)
    dtype: str = "auto"
    rule: str = "lru"
    repeats: int = 3
    n_queries: int = 2000
    per_query: int = 8
    pool: int = 200
    query_tokens: int = 32
    held: float = 0.5
    seed: int = 0
    shape: ModelShape = field(default_factory=ModelShape)


@dataclass(frozen=True, slots=True)
class FirstTokenTiming:
    """Times of one setting. tier: "" for the plain prompt. computed: share of tokens. seconds: of each repetition."""

    tier: str
    share: Recompute
    computed: float
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class QueryQuarter:
    """A quarter of the queries. computed: share of tokens that was computed. hits: share of chunks that was found."""

    computed: float
    hits: float


def run(plan: ChunkBench, tell: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Both parts, as the fields of a report."""
    model = plan.shape.build(plan.seed)
    timings = _first_tokens(plan, model, tell)
    quarters = _steady(plan, model, tell) if plan.n_queries else []
    parameters = sum(weight.numel() for weight in model.parameters())
    return {
        **describe_machine().header("chunks"),
        "model": {**plan.shape.config(), "parameters": parameters},
        "plan": {**asdict(plan), "shape": None},
        "first_token": [asdict(one) for one in timings],
        "quarters": [asdict(one) for one in quarters],
    }


def _first_tokens(plan: ChunkBench, model: Any, tell: Callable[[str], None]) -> list[FirstTokenTiming]:
    """The plain prompt, and chunks from each tier at each share, in turns."""
    chunks = random_chunks(plan.chunks, plan.tokens, plan.shape.vocab, plan.seed)
    suffix = random_chunks(1, plan.suffix, plan.shape.vocab, plan.seed + 1)[0]
    settings: list[tuple[str, Recompute]] = [("", 1), *((tier, share) for tier in TIERS for share in plan.shares)]
    found: dict[tuple[str, Recompute], list[tuple[float, float]]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory() as folder:
        engines = {tier: _engine(plan, model, chunks, folder, memory) for tier, memory in TIERS.items()}
        try:
            for repeat in range(plan.repeats):
                tell(f"first token, repetition {repeat + 1} of {plan.repeats}")
                prompt = shuffled(chunks, suffix, plan.seed + repeat)
                for tier, share in random.Random(repeat).sample(settings, len(settings)):
                    found[tier, share].append(_once(engines[tier or "memory"], prompt, share))
        finally:
            for llm in engines.values():
                llm.close()
    return [
        FirstTokenTiming(tier, share, values[-1][1], tuple(seconds for seconds, _ in values))
        for (tier, share), values in found.items()
    ]


def _engine(plan: ChunkBench, model: Any, chunks: Sequence[Ids], folder: str, memory: str | int) -> LLM:
    """An engine whose store has all chunks, each computed after a text that no prompt contains."""
    store = ChunkStore(folder, memory=memory, dtype=plan.dtype, rule=plan.rule)
    llm = LLM(model, method="full", chunk_store=store)
    others = random_chunks(len(chunks), plan.tokens, plan.shape.vocab, plan.seed + 5)
    for other, chunk in zip(others, chunks, strict=True):
        llm.generate(Prompt([other, Chunk(chunk), chunk[:1]]), SamplingParams(max_tokens=1))
    return llm


def _once(llm: LLM, prompt: Prompt, share: Recompute) -> tuple[float, float]:
    """Seconds from arrival to the first token, and the share of the prompt that was computed."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    (out,) = llm.generate(prompt, params, cache=CacheOptions(recompute=share))
    kv, times = out.completions[0].kv, out.times
    assert times.first_token is not None, "it has one token"
    assert kv is not None, "it has a cache"
    return times.first_token - times.arrived, 1 - kv.reused_tokens / len(out.prompt_token_ids)


def _steady(plan: ChunkBench, model: Any, tell: Callable[[str], None]) -> list[QueryQuarter]:
    """Queries one after another, by quarter."""
    chunks = random_chunks(plan.pool, plan.query_tokens, plan.shape.vocab, plan.seed + 2)
    suffix = random_chunks(1, max(1, plan.query_tokens // 8), plan.shape.vocab, plan.seed + 3)[0]
    store = ChunkStore(None, memory=_room(plan, model), dtype=plan.dtype, rule=plan.rule)
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    prompts = list(queries(chunks, plan.n_queries, plan.per_query, suffix, plan.seed + 4))
    whole = plan.per_query * plan.query_tokens + len(suffix)
    quarters: list[QueryQuarter] = []
    with LLM(model, method="full", chunk_store=store) as llm:
        for quarter in range(4):
            part = prompts[quarter * len(prompts) // 4 : (quarter + 1) * len(prompts) // 4]
            tell(f"queries, quarter {quarter + 1} of 4")
            before, hits = llm.stats().prompt_tokens, store.stats().memory_hits
            for prompt in part:
                llm.generate(prompt, params)
            computed = llm.stats().prompt_tokens - before
            found = store.stats().memory_hits - hits
            quarters.append(QueryQuarter(computed / (whole * len(part)), found / (plan.per_query * len(part))))
    return quarters


def _room(plan: ChunkBench, model: Any) -> int:
    """Bytes of the store: what a share of the pool takes."""
    probe = ChunkStore(None, dtype=plan.dtype)
    with LLM(model, method="full", chunk_store=probe):
        return int(plan.held * plan.pool) * probe.size_of(plan.query_tokens)


_TIMES = ("chunks in, computed again", "of the prompt computed", "s to the first token (least to most)", "x plain")
_QUARTERS = ("quarter", "tokens computed, x plain", "chunks found")


def markdown(data: dict[str, Any]) -> str:
    """Two tables: times to the first token, and what each quarter of the queries computed."""
    plan = data["plan"]
    parts = [
        "# Prompts of stored chunks\n",
        f"{data['hardware']}; {data['software']}.\n",
        f"`{data['command']}`\n" if "command" in data else "",
        f"{model_phrase(data['model'])}, {data['model']['parameters'] / 1e6:.3g}M parameters. Store: dtype "
        f"{plan['dtype']}, rule {plan['rule']}.\n",
        f"{plan['chunks']} chunks of {plan['tokens']} tokens in random order and {plan['suffix']} behind them; medians "
        f"of {plan['repeats']} repetitions in turns; files are in the system's cache.\n",
        markdown_table(_TIMES, _first_token_rows(data["first_token"])),
    ]
    if data["quarters"]:
        parts += [
            f"{plan['n_queries']:,} queries of {plan['per_query']} of {plan['pool']} chunks of {plan['query_tokens']} "
            f"tokens, drawn evenly, one after another; the store holds {plan['held']:.0%} of the chunks; "
            "recompute auto.\n",
            markdown_table(_QUARTERS, _quarters(data["quarters"])),
        ]
    return "\n".join(parts)


def _first_token_rows(timings: list[dict[str, Any]]) -> list[list[str]]:
    plain = statistics.median(timings[0]["seconds"])
    return [
        [
            _setting(one),
            f"{one['computed']:.0%}",
            f"{statistics.median(one['seconds']):.4g} ({min(one['seconds']):.4g} to {max(one['seconds']):.4g})",
            f"{statistics.median(one['seconds']) / plain:.2f}",
        ]
        for one in timings
    ]


def _setting(one: dict[str, Any]) -> str:
    if not one["tier"]:
        return "plain"
    return f"{one['tier']}, {one['share'] if one['share'] == 'auto' else format(one['share'], '.0%')}"


def _quarters(quarters: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [str(number), f"{one['computed']:.3f}", f"{one['hits']:.1%}"] for number, one in enumerate(quarters, start=1)
    ]
