"""Claims about serving: batches, shared beginnings, stored chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from generated.claims.form import CONTRADICTED, PARTLY, REPRODUCED, UNSEEN, Claim, Tried, figure, of_all, verdict
from generated.results import read


def _mean(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and its 95 % interval by the bootstrap."""
    drawn = np.random.default_rng(0).integers(0, len(values), (4000, len(values)))
    low, high = np.quantile(np.asarray(values)[drawn].mean(1), (0.025, 0.975))
    return float(np.mean(values)), float(low), float(high)


def _shown(values: Sequence[float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*_mean(values))


# ---------------------------------------------------------------------- batches


def batch() -> Tried:
    """Seconds of a batch whose prompts share beginnings, in order of arrival and planned."""
    data = read("batch")
    seconds = {row["order"]: float(np.median(row["seconds"])) for row in data["results"]}
    ratio = seconds["arrival"] / seconds["batch"]
    return Tried(
        f"{ratio:.2f} x the order of arrival, {seconds['sorted'] / seconds['batch']:.2f} x sorted prompts; one run",
        f"{data['plan']['kv_memory']} for caches",
        f"random Llama of 168M, {data['prompts']} prompts, {data['best']:.0%} of their tokens in common",
        "batch.md",
        "millpond bench batch",
        REPRODUCED if ratio >= 1.1 else PARTLY,
    )


def _gains(rows: Sequence[dict[str, Any]], other: str) -> list[float]:
    """Of each cell the median over repetitions: how many times the planned batch's CPU seconds another run takes."""
    return [
        float(np.median([a / b for a, b in zip(row["cpu_s"][other], row["cpu_s"]["batch"], strict=True)]))
        for row in rows
    ]


def batch_grid() -> Tried:
    """A planned batch over degrees of sharing, pools and answers."""
    data = read("batch-grid")
    load = data["load"]
    shared = [row for row in data["rows"] if row["degree"] > 1]
    alone = [row for row in data["rows"] if row["degree"] == 1]
    gains = _gains(shared, "arrival")
    reads = [row["read"]["arrival"] / row["read"]["batch"] for row in shared]
    nothing = f"; nothing shared {_shown(_gains(alone, 'arrival'))} x" if alone else ""
    _, low, high = _mean(gains)
    return Tried(
        f"CPU seconds of the order of arrival {_shown(gains)} x over {len(gains)} cells that share, of sorted prompts "
        f"{_shown(_gains(shared, 'sorted'))} x{nothing}; arrival computes {_shown(reads)} x the tokens; means over "
        f"cells, medians of {load['repeats']} runs each",
        f"{' and '.join(f'{pool:.0%}' for pool in sorted({row['pool'] for row in shared}))} of what the prompts take",
        f"random Llama of 2 layers, {load['prompts']} prompts of {load['shared'] + load['own']}",
        "batch-grid.json",
        "benchmarks/performance/batch_grid.py",
        verdict(low - 1, high - 1, 0.1),
    )


def batch_parts() -> Tried:
    """A planned batch with one part left out."""
    data = read("batch-grid")
    rows = [row for row in data["rows"] if "no groups" in row["cpu_s"]]
    names = {"groups": "groups", "order": "the order", "memory": "batching by memory", "one call": "one call"}
    gains = {part: _gains(rows, f"no {part}") for part in names}
    unequal = _gains([row for row in rows if row["answers"] == "unequal"], "no order")
    adds = [_mean(found)[1] > 1 for found in gains.values()]
    return Tried(
        "CPU seconds without a part, over all of them: "
        + "; ".join(f"{name} {_shown(gains[part])}" for part, name in names.items())
        + (f"; the order with unequal answers {figure(unequal)}" if unequal else ""),
        "a quarter of what the prompts take",
        f"random Llama of 2 layers, {len(rows)} cells that share, medians of {data['load']['repeats']} runs each",
        "batch-grid.json",
        "benchmarks/performance/batch_grid.py",
        REPRODUCED if all(adds) else PARTLY if any(adds) else UNSEEN,
    )


# ---------------------------------------------------------------------- more requests in one memory


def d2o() -> Tried:
    """Tokens a second where the memory holds four requests with their full caches."""
    data = read("merging-load")
    load, rows = data["load"], data["results"]
    rates = {method: [row["tokens_per_s"] for row in rows if row["method"] == method] for method in load["methods"]}
    gains, h2o = (
        [own / full for own, full in zip(rates[method], rates["full"], strict=True)] for method in ("d2o", "h2o")
    )
    flight = max(row["most_in_flight"] for row in rows if row["method"] == "d2o")
    return Tried(
        f"tokens a second {figure(gains)} x the full cache in {len(gains)} rounds, {flight} requests in flight in "
        f"place of {load['whole']:g}; `h2o`, which merges nothing, {figure(h2o)} x",
        f"{data['kv_bytes'] / 2**20:,.0f} MiB for all caches; a fifth of the entries",
        f"random Llama of {load['layers']} layers, width 1,024, {load['kv_heads']} heads, {load['requests']} "
        f"requests of {load['prompt']:,} + {load['answer']:,}",
        "merging-load.json",
        "benchmarks/performance/engine_load.py",
        verdict(min(gains) - 1, max(gains) - 1, 2.0),
    )


# ---------------------------------------------------------------------- shared beginnings


def shared_attention() -> Tried:
    """Attention over entries that all sequences share."""
    rows = {row["name"]: row for row in read("kernels")["results"]}
    found = rows["32 x 2048, MHA, 8 heads of 128, 100% shared"]
    return Tried(
        f"{found['share']:.1f} x each sequence alone, median of 16 rounds",
        "the shared entries once",
        "32 sequences of 2,048 entries, 8 heads of 128",
        "kernels.md",
        "millpond bench kernels",
        verdict(found["share"] - 1, found["share"] - 1, 2.2),
    )


def _shared_tried(shown: str, verdict_of: str) -> Tried:
    data = read("shared-prompt")
    rows = sorted(data["rows"], key=lambda row: row["prompt"])
    held = ", ".join(f"{row['once']['kv_bytes'] / 1e6:,.0f} of {row['each']['kv_bytes'] / 1e6:,.0f} MB" for row in rows)
    lengths = ", ".join(f"{row['prompt']:,}" for row in rows)
    return Tried(
        shown,
        held,
        f"random Llama of {data['load']['parameters'] / 1e9:.2f}B, 16 query and KV heads, {rows[0]['sequences']} "
        f"sequences behind {lengths} common tokens, {rows[0]['new_tokens']} new ones",
        "shared-prompt.json",
        "benchmarks/performance/shared_prompt.py",
        verdict_of,
    )


def shared_memory() -> Tried:
    """Bytes of caches where a prompt is held once."""
    spared = [1 - row["once"]["kv_bytes"] / row["each"]["kv_bytes"] for row in read("shared-prompt")["rows"]]
    shown = f"{' to '.join(sorted({f'{share:.0%}' for share in (min(spared), max(spared))}))} less at the peak"
    return _shared_tried(shown, REPRODUCED if min(spared) >= 0.7 else PARTLY)


def shared_decoding() -> Tried:
    """Tokens a second where a prompt is held and attended once."""
    rows = sorted(read("shared-prompt")["rows"], key=lambda row: row["prompt"])
    shown = [
        "{:.2f} ({:.2f} to {:.2f})".format(*row["once over each"])
        + ", of pages held once and attended by each {:.2f} ({:.2f} to {:.2f})".format(*row["once over held once"])
        for row in rows
    ]
    reading = ", ".join(f"{row['each']['read_cpu_s'] / row['once']['read_cpu_s']:.1f}" for row in rows)
    least = min(row["once over each"][1] for row in rows)
    most = max(row["once over each"][2] for row in rows)
    return _shared_tried(
        f"x the decoded tokens a second of caches of their own: {'; '.join(shown)}; reading takes those {reading} x as "
        "long, one prompt's time for each",
        verdict(least - 1, most - 1, 0.6),
    )


# ---------------------------------------------------------------------- stored chunks


def chunks_computed() -> Tried:
    """What is computed again of stored chunks, and what of the divergence it leaves."""
    rows = {row["setting"]: row for row in read("chunk-reuse-smollm2")["rows"]}
    own = rows["behind / auto"]
    middle, low, high = own["of_alone"]
    return Tried(
        f"{own['computed']:.0%} of the tokens computed; {middle:.2f} ({low:.2f} to {high:.2f}) of the divergence of "
        "chunks stored alone is left",
        "chunks in bf16",
        "SmolLM2-135M, 20 windows of 6 chunks of 96",
        "chunk-reuse-smollm2.md",
        "millpond bench chunks",
        PARTLY,
    )


def chunks_first_token() -> Tried:
    """The time to the first token with stored chunks."""
    rows = {row["setting"]: row for row in read("chunk-first-token")["rows"]}
    own = rows["15 %, memory"]
    return Tried(
        f"{1 / own['of_plain']:.1f} x sooner than reading all, 15 % computed again; one run",
        "8 chunks of 256 in float32",
        "SmolLM2-135M",
        "chunk-first-token.md",
        "millpond bench chunks",
        REPRODUCED if own["of_plain"] <= 0.5 else PARTLY,
    )


#: Rows of streams with chunks of 64 tokens, and with longer ones.
STREAMS = ("chunk-serving", "chunk-serving-long")


def _served(rows: Sequence[dict[str, Any]], field: str, way: str, other: str) -> list[float]:
    """A field of a way over that of another, of each stream."""
    value: dict[tuple[Any, ...], float] = {(row["in_flight"], row["seed"], row["way"]): row[field] for row in rows}
    return [value[(*stream, way)] / value[(*stream, other)] for *stream, name in value if name == way]


def _stream(data: dict[str, Any]) -> str:
    load, rows = data["load"], data["rows"]
    flights = " or ".join(str(n) for n in sorted({row["in_flight"] for row in rows}))
    return (
        f"{len({(row['in_flight'], row['seed']) for row in rows})} of {load['queries']} requests of {load['picked']} "
        f"chunks of {load['tokens']}, {np.mean([row['repeated'] for row in rows]):.0%} repeated, {flights} in flight"
    )


def _served_tried(shown: Callable[[Sequence[dict[str, Any]]], tuple[str, str]]) -> Tried:
    """`shown` says what came out of the rows of a load, and its verdict."""
    loads = [read(name) for name in STREAMS]
    found = [shown(data["rows"]) for data in loads]
    return Tried(
        "; ".join(f"chunks of {data['load']['tokens']}: {says}" for data, (says, _) in zip(loads, found, strict=True)),
        "chunks as they are, no limit",
        f"SmolLM2-135M, streams: {'; '.join(map(_stream, loads))}",
        f"{STREAMS[-1]}.json",
        "benchmarks/performance/chunk_serving.py",
        of_all([verdict_of for _, verdict_of in found]),
    )


def served_tokens() -> Tried:
    """Tokens computed in a stream of requests with stored chunks."""

    def shown(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
        over_all, over_prefix = _served(rows, "read", "both", "plain"), _served(rows, "read", "both", "prefix")
        same = [row["same"] for row in rows if row["way"] == "both"]
        reached = max(over_all) <= 0.25, max(over_prefix) <= 0.49
        return (
            f"{1 - np.median(over_all):.0%} less than everything, {1 - np.median(over_prefix):.0%} less than with a "
            f"prefix cache, {np.mean(same):.0%} of first tokens the same",
            REPRODUCED if all(reached) else PARTLY if max(over_prefix) < 1 else CONTRADICTED,
        )

    return _served_tried(shown)


def served_times() -> Tried:
    """Throughput and latency of a stream of requests with stored chunks, beside a prefix cache."""

    def shown(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
        rates, latencies, firsts = (
            [1 / found for found in _served(rows, field, "both", "prefix")] for field in ("cpu_s", "latency", "first")
        )
        wanted = min(min(rates) - 1.6, min(latencies) - 2.0) >= 0
        return (
            f"requests a CPU second {figure(rates)} x those with a prefix cache, latency {figure(latencies)} x and "
            f"the first token {figure(firsts)} x sooner",
            REPRODUCED if wanted else verdict(min(rates) - 1, max(rates) - 1, float("inf")),
        )

    return _served_tried(shown)


CLAIMS = (
    Claim("BatchLLM", "1.1 to 2 x by common beginnings and a planned order", batch),
    Claim("BatchLLM", "1.1 to 2 x over degrees of sharing, memories and answers", batch_grid),
    Claim(
        "BatchLLM", "groups, the order by answers, batching by memory and the one kernel each add to it", batch_parts
    ),
    Claim("D2O", "more than 3 x the throughput", d2o),
    Claim("ChunkAttention", "3.2 to 4.8 x attention over shared prompts", shared_attention),
    Claim("ChunkAttention", "70 to 90 % less memory for keys and values", shared_memory),
    Claim("ChunkAttention", "1.6 to 2.3 x tokens a second end to end", shared_decoding),
    Claim("Cache-Craft", "75 % less is computed, and answers stay", chunks_computed),
    Claim("Cache-Craft", "51 % less is computed than with a prefix cache, 75 % less than all", served_tokens),
    Claim("Cache-Craft", "2 x less latency", chunks_first_token),
    Claim("Cache-Craft", "1.6 x throughput and 2 x less latency with requests in flight", served_times),
)
