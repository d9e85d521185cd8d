"""Claims about serving: batches, shared beginnings, stored chunks, layouts of devices, paging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from generated.claims.form import CONTRADICTED, PARTLY, REPRODUCED, UNSEEN, Claim, Tried, verdict
from generated.results import RESULTS, read


def _figure(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the least and the largest."""
    return f"{np.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _middle(values: Sequence[float]) -> float:
    return float(np.mean(values))


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
        + (f"; the order with unequal answers {_figure(unequal)}" if unequal else ""),
        "a quarter of what the prompts take",
        f"random Llama of 2 layers, {len(rows)} cells that share, medians of {data['load']['repeats']} runs each",
        "batch-grid.json",
        "benchmarks/performance/batch_grid.py",
        REPRODUCED if all(adds) else PARTLY if any(adds) else UNSEEN,
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


def _served(field: str, way: str, other: str) -> list[float]:
    """A field of a way over that of another, of each stream."""
    rows = read("chunk-serving")["rows"]
    value: dict[tuple[Any, ...], float] = {(row["in_flight"], row["seed"], row["way"]): row[field] for row in rows}
    return [value[(*stream, way)] / value[(*stream, other)] for *stream, name in value if name == way]


def _served_tried(shown: str, verdict_of: str) -> Tried:
    data = read("chunk-serving")
    load, rows = data["load"], data["rows"]
    repeated = np.mean([row["repeated"] for row in rows])
    flights = " or ".join(str(n) for n in sorted({row["in_flight"] for row in rows}))
    return Tried(
        shown,
        "chunks as they are, no limit",
        f"SmolLM2-135M, streams of {load['queries']} requests of {load['picked']} chunks of {load['tokens']}, "
        f"{repeated:.0%} repeated, {flights} in flight",
        "chunk-serving.json",
        "benchmarks/performance/chunk_serving.py",
        verdict_of,
    )


def served_tokens() -> Tried:
    """Tokens computed in a stream of requests with stored chunks."""
    over_all, over_prefix = _served("read", "both", "plain"), _served("read", "both", "prefix")
    same = [row["same"] for row in read("chunk-serving")["rows"] if row["way"] == "both"]
    reached = max(over_all) <= 0.25, max(over_prefix) <= 0.49
    return _served_tried(
        f"{1 - np.median(over_all):.0%} less than everything, {1 - np.median(over_prefix):.0%} less than with a prefix "
        f"cache (medians of {len(over_all)} streams; most computed {max(over_all):.2f} and {max(over_prefix):.2f}); "
        f"{np.mean(same):.0%} of first tokens the same",
        REPRODUCED if all(reached) else PARTLY if max(over_prefix) < 1 else CONTRADICTED,
    )


def served_times() -> Tried:
    """Throughput and latency of a stream of requests with stored chunks, beside a prefix cache."""
    rates = [1 / found for found in _served("cpu_s", "both", "prefix")]
    latencies = [1 / found for found in _served("latency", "both", "prefix")]
    firsts = [1 / found for found in _served("first", "both", "prefix")]
    wanted = min(min(rates) - 1.6, min(latencies) - 2.0) >= 0
    return _served_tried(
        f"requests a CPU second {_figure(rates)} x those with a prefix cache; latency {_figure(latencies)} x and the "
        f"first token {_figure(firsts)} x sooner; {len(rates)} streams",
        REPRODUCED if wanted else verdict(min(rates) - 1, max(rates) - 1, float("inf")),
    )


# ---------------------------------------------------------------------- layouts


def split() -> Tried:
    """Goodput with prompts apart from answers."""
    rows = [row for row in read("whether-to-split-2")["results"] if row["cache"] == "full"]
    gains = [
        row["apart"]["goodput_per_device"] / row["together"]["goodput_per_device"]
        for row in rows
        if row["together"]["goodput_per_device"]
    ]
    return Tried(
        f"apart at most {max(gains):.2f} x together, over {len(rows)} loads and links; simulated",
        "full caches",
        "OPT-13B by the A100's published step times, 2 devices",
        "whether-to-split-2.md",
        "benchmarks/performance/whether_to_split.py",
        PARTLY if max(gains) > 1 else CONTRADICTED,
    )


#: Kinds of layouts in `slo-scale.json`: with our kernels' times in common, and vLLM's.
SAME, VLLM, APART = "together, steps of", "together, vLLM's times", "apart"


def _best(kind: str, rates: bool) -> dict[tuple[str, float], list[float]]:
    """By load and rate what the layout of a kind with the best mean needs or serves, by seed.

    rates: scales at each rate; else goodput, at a rate of 0.
    """
    found: dict[tuple[str, float], dict[str, list[float]]] = {}
    for row in read("slo-scale")["rows"]:
        if row["kind"].startswith(kind):
            for rate, figure in row["scales"] if rates else [(0.0, row["goodput"])]:
                layouts = found.setdefault((row["load"], rate), {})
                layouts.setdefault(f"{row['kind']}: {row['layout']}", []).append(figure)
    return {
        at: min(layouts.values(), key=_middle) if rates else max(layouts.values(), key=_middle)
        for at, layouts in found.items()
    }


def _layouts_tried(shown: str, verdict_of: str) -> Tried:
    data = read("slo-scale")
    seeds = len({row["seed"] for row in data["rows"]})
    return Tried(
        shown,
        "full caches in 72 GB a device",
        f"OPT-13B by the A100's published step times, {seeds} seeds of {data['load']['requests']} requests; simulated",
        "slo-scale.json",
        "benchmarks/performance/slo_scale.py",
        verdict_of,
    )


def tighter_limits() -> Tried:
    """How much tighter limits are kept with prompts apart from answers, at the same rate of each device."""
    apart = _best(APART, True)
    ratios = {
        kind: {at: [b / a for a, b in zip(apart[at], scales, strict=True)] for at, scales in _best(kind, True).items()}
        for kind in (SAME, VLLM)
    }
    kept = [at for at, scales in apart.items() if max(scales) <= 1]
    same, vllm = (max((ratios[kind][at] for at in kept), key=_middle) for kind in (SAME, VLLM))
    most, beyond = max(ratios[VLLM].items(), key=lambda pair: _middle(pair[1]))
    return _layouts_tried(
        f"at most {_figure(vllm)} x those of vLLM's step times together, where apart keeps the paper's limits, and "
        f"{_figure(same)} x those of the same kernels together; at {most[1]:g} requests a second and device, more than "
        f"vLLM's times can serve, {_figure(beyond, 0)} x",
        verdict(min(vllm) - 1, max(vllm) - 1, 12.6 - 1),
    )


def goodput() -> Tried:
    """Goodput with prompts apart from answers, beside vLLM's step times."""
    apart, same, vllm = (_best(kind, False) for kind in (APART, SAME, VLLM))
    at = next(iter(vllm))
    over_vllm, over_same = ([a / b for a, b in zip(apart[at], other[at], strict=True)] for other in (vllm, same))
    return _layouts_tried(
        f"requests a second and device {_figure(over_vllm)} x those of vLLM's step times together, and "
        f"{_figure(over_same)} x those of the same kernels together",
        verdict(min(over_vllm) - 1, max(over_vllm) - 1, 7.4 - 1),
    )


# ---------------------------------------------------------------------- paging


def paging() -> Tried:
    """Misses with right and with wrong bits."""
    data = read("paging-errors")
    misses: dict[tuple[str, Any], list[float]] = {}
    for row in data["rows"]:
        misses.setdefault((row["rule"], row["wrong"]), []).append(row["misses"])
    (least,), (lru,) = misses["belady", None], misses["lru", None]
    errors = sorted(wrong for rule, wrong in misses if rule == "mark0")
    shown = [
        f"{wrong} % {np.mean(misses['mark0', wrong]) / least:.3f} "
        f"({min(misses['mark0', wrong]) / least:.3f} to {max(misses['mark0', wrong]) / least:.3f})"
        for wrong in (0, 5, 20, errors[-1])
    ]
    within = all(row["misses"] <= row["bound"] for row in data["rows"] if "bound" in row)
    worst = max(misses["learned", errors[-1]]) / lru
    near = max(misses["mark0", 0]) <= 1.01 * least
    little = max(misses["mark0", 20]) < lru and worst <= 1.02
    seeds = len(misses["mark0", errors[-1]])
    return Tried(
        f"misses of `mark0` over the least possible by wrong bits: {', '.join(shown)}; LRU {lru / least:.3f}, "
        f"`learned` with {errors[-1]} % wrong at most {worst:.3f} x LRU; "
        f"{'all' if within else 'not all'} within the theorems",
        f"{data['load']['pages']:,} blocks",
        f"Mooncake's conversation trace, {data['load']['requests']:,} requests, {seeds} seeds",
        "paging-errors.json",
        "benchmarks/performance/paging_errors.py",
        REPRODUCED if near and little and within else PARTLY if near else CONTRADICTED,
    )


def _when_run(rows: str, tried: Callable[[], Tried], script: str) -> Callable[[], Tried] | str:
    """What came out, or the command where there are no rows yet."""
    return tried if (RESULTS / f"{rows}.json").exists() else f"`benchmarks/performance/{script}`"


CLAIMS = (
    Claim("BatchLLM", "1.1 to 2 x by common beginnings and a planned order", batch),
    Claim(
        "BatchLLM",
        "1.1 to 2 x over degrees of sharing, memories and answers",
        _when_run("batch-grid", batch_grid, "batch_grid.py"),
    ),
    Claim(
        "BatchLLM",
        "groups, the order by answers, batching by memory and the one kernel each add to it",
        _when_run("batch-grid", batch_parts, "batch_grid.py"),
    ),
    Claim("ChunkAttention", "3.2 to 4.8 x attention over shared prompts", shared_attention),
    Claim("ChunkAttention", "70 to 90 % less memory for keys and values", shared_memory),
    Claim("ChunkAttention", "1.6 to 2.3 x tokens a second end to end", shared_decoding),
    Claim("Cache-Craft", "75 % less is computed, and answers stay", chunks_computed),
    Claim(
        "Cache-Craft",
        "51 % less is computed than with a prefix cache, 75 % less than all",
        _when_run("chunk-serving", served_tokens, "chunk_serving.py"),
    ),
    Claim("Cache-Craft", "2 x less latency", chunks_first_token),
    Claim(
        "Cache-Craft",
        "1.6 x throughput and 2 x less latency with requests in flight",
        _when_run("chunk-serving", served_times, "chunk_serving.py"),
    ),
    Claim("DistServe", "prompts apart from answers serve more requests", split),
    Claim("DistServe", "they serve up to 7.4 x the requests of vLLM", goodput),
    Claim("DistServe", "they keep up to 12.6 x tighter limits than vLLM", tighter_limits),
    Claim(
        "Paging with Succinct Predictions", "a bit a block comes near the optimum, and wrong bits cost little", paging
    ),
)
