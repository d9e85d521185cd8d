"""H2O's own claims."""

from __future__ import annotations

import json
import lzma
from typing import Any

import numpy as np

from generated.claims.form import CONTRADICTED, PARTLY, REPRODUCED, UNSEEN, Claim, Tried, found_share, verdict
from generated.claims.text import of_text
from generated.results import RESULTS, read

#: Of the right answers: less than this is no loss.
LESS = 0.05
#: Lengths of answers behind prompts of 512 tokens.
_ANSWERS = (32, 512, 1024)


def throughput() -> Tried:
    """Tokens a second from a disk, at one limit of memory, with as many KV heads as query heads."""
    shown, wanted = [], []
    for new in _ANSWERS:
        data = read(f"offload-mha-{new}/offload")
        rate = {row["cell"]: row.get("tokens_per_s", 0.0) for row in data["rows"]}
        best = [max(rate[name] for name in rate if name.startswith(peer)) for peer in ("accelerate", "flexgen")]
        ratios = [rate["h2o"] / other for other in (*best, rate["full"])]
        shown.append(f"512 + {new:,}: {ratios[0]:.1f} x, {ratios[1]:.1f} x and {ratios[2]:.1f} x")
        wanted.append(ratios[0] >= 29 and min(ratios[1:]) >= 3)
    return Tried(
        f"Accelerate, FlexGen's code on a CPU, our own full cache: {'; '.join(shown)}; one run each",
        f"{data['settings']['memory'] / 2**20:.0f} MiB for a model of {data['model_bytes'] / 1e6:.0f} MB",
        f"random OPT of {data['settings']['shape'].removeprefix('opt-')}",
        f"offload-mha-{_ANSWERS[-1]}/offload.md",
        "millpond bench offload",
        REPRODUCED if any(wanted) else PARTLY,
    )


def throughput_of_groups() -> Tried:
    """The same where query heads share their keys and values, so that a cache is small beside the weights."""
    data = read("offload-1b/offload")
    rate = {row["cell"]: row.get("tokens_per_s", 0.0) for row in data["rows"]}
    stock = max(rate[name] for name in rate if name.startswith("accelerate"))
    ratios = rate["h2o"] / stock, rate["h2o"] / rate["deepspeed-nvme-8"], rate["h2o"] / rate["full"]
    return Tried(
        f"{ratios[0]:.1f} x Accelerate, {ratios[1]:.1f} x DeepSpeed from files, {ratios[2]:.1f} x our own full cache; "
        "one run each",
        f"{data['settings']['memory'] / 2**20:.0f} MiB for a model of {data['model_bytes'] / 1e9:.1f} GB",
        "random Llama of 1.04B, 8 query heads to a KV head, 512 + 128",
        "offload-1b/offload.md",
        "millpond bench offload",
        REPRODUCED if min(ratios[:2]) >= 29 and ratios[2] >= 3 else PARTLY,
    )


def latency() -> Tried:
    """Seconds of one batch with all in memory, prompts included."""
    data = read("equal-batch")
    spent: dict[str, list[float]] = {}
    for row in data["results"]:
        spent.setdefault(row["method"], []).append(row["read_s"] + row["decode_s"])
    ratios = sorted(full / h2o for full, h2o in zip(spent["full"], spent["h2o"], strict=True))
    load = data["load"]
    return Tried(
        f"{ratios[len(ratios) // 2]:.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} rounds), "
        f"{load['requests']} requests of {load['prompt']:,} + {load['answer']:,}",
        "a fifth of the entries",
        f"random Llama of {load['layers']} layers, width 1,024, {load['kv_heads']} heads",
        "equal-batch.json",
        "benchmarks/performance/engine_load.py",
        verdict(ratios[0] - 1, ratios[-1] - 1, 0.9),
    )


def sparsity() -> Tried:
    """Entries below 1 % of their row's largest."""
    data = json.loads(lzma.decompress((RESULTS / "attention-mass.json.xz").read_bytes()))
    layers = [np.mean(text["sparsity"], 1) for text in data["texts"].values()]
    many = [int((each > 0.95).sum()) for each in layers]
    return Tried(
        f"{np.mean(layers):.0%} over all layers; more than 95 % in {' and '.join(map(str, many))} of {len(layers[0])} "
        f"on {len(many)} texts",
        "full cache",
        f"SmolLM2-135M, {data['windows']} windows of {data['length']:,} a text",
        "attention-mass.json.xz",
        "benchmarks/quality/attention_mass.py",
        PARTLY,
    )


def cooccurrence() -> Tried:
    """Attention that words gather, and how many words they stand beside."""
    data = read("cooccurrence")["models"]
    sums, places = ([own[name] for own in data.values()] for name in ("gathered", "per_place"))
    shown = [
        f"{name} {each['mean']:.2f} ({each['interval'][0]:.2f} to {each['interval'][1]:.2f}) by the sum, "
        f"{place['mean']:.2f} ({place['interval'][0]:.2f} to {place['interval'][1]:.2f}) by place"
        for name, each, place in zip(data, sums, places, strict=True)
    ]
    by_place = min(place["interval"][0] for place in places)
    return Tried(
        "Spearman's correlation: " + "; ".join(shown),
        "full cache",
        f"{' and '.join(data)}, {_windows(data)}",
        "cooccurrence.json",
        "benchmarks/quality/cooccurrence.py",
        REPRODUCED if by_place >= 0.5 else PARTLY,
    )


def argmax() -> Tried:
    """Queries whose largest entry is a heavy one."""
    data = read("cooccurrence")["models"]
    shown = [
        f"{name} {own['argmax']['mean']:.0%} ({own['argmax']['interval'][0]:.0%} to {own['argmax']['interval'][1]:.0%})"
        f", without the first four tokens {own['argmax_beyond']['mean']:.0%}"
        for name, own in data.items()
    ]
    least = min(own["argmax_beyond"]["interval"][0] for own in data.values())
    return Tried(
        "; ".join(shown),
        "full cache",
        f"{' and '.join(data)}, {_windows(data)}",
        "cooccurrence.json",
        "benchmarks/quality/cooccurrence.py",
        REPRODUCED if least >= 0.5 else PARTLY,
    )


def _windows(data: dict[str, Any]) -> str:
    own = next(iter(data.values()))
    return f"{own['windows'] * len(own['texts'])} windows of {own['length']:,}"


def heavy_hitters_carry() -> Tried:
    """Perplexity without the heaviest entries, and without the lightest."""
    rows = {row["method"]: row for row in read("h2o-parts-real")}
    kept, lost = rows["h2o:sinks=0"], rows["no_heavy:sinks=4"]
    return Tried(
        f"perplexity {lost['more']:+.1%} ({lost['low']:+.1%} to {lost['high']:+.1%}) without the heavy ones, "
        f"{kept['more']:+.1%} ({kept['low']:+.1%} to {kept['high']:+.1%}) with them",
        f"{kept['bytes']:.0%}",
        f"SmolLM2-135M, {kept['windows']} windows of WikiText-2",
        "h2o-parts-real.md",
        "benchmarks/quality/real.sh",
        verdict(lost["low"] - kept["high"], lost["high"] - kept["low"], 0.0),
    )


def a_fifth_is_enough() -> Tried:
    """Perplexity of h2o with a fifth of the entries."""
    row = of_text("h2o", "20%")
    return Tried(
        f"perplexity {row['more']:+.1%} ({row['low']:+.1%} to {row['high']:+.1%})",
        f"{row['bytes']:.0%}",
        f"SmolLM2-135M, {row['windows']} windows of WikiText-2",
        "real-text.md",
        "benchmarks/quality/real_text.py",
        CONTRADICTED if row["low"] > 0.05 else REPRODUCED,
    )


def choices() -> Tried:
    """Endings of paragraphs, of four, after five examples: beside the full cache on the same questions."""
    rows = {(row["method"], row["budget"]): row for row in read("endings")}
    full = rows["full", ""]
    score, fifth = full["score"], rows["h2o", "20%"]
    if score["low"] <= 0.25:
        raise SystemExit("endings.json: the full cache is not above chance, so it says nothing of an evicting one")
    ordered = sorted(rows.items(), key=lambda one: float(one[0][1].rstrip("%") or 100))
    each = [
        f"`{method}` " + ", ".join(f"{budget} {_change(row)}" for (name, budget), row in ordered if name == method)
        for method in ("h2o", "streaming")
    ]
    difference = fifth["difference"]
    return Tried(
        f"of four endings the full cache finds {found_share(full)}; others less that: {'; '.join(each)}",
        f"{fifth['bytes']:.0%} at 20%, in whole pages",
        f"SmolLM2-135M, {full['questions']} paragraphs of WikiText-2, five examples each",
        "endings.json",
        "benchmarks/quality/paper_rows.sh",
        CONTRADICTED if difference["high"] < 0 else REPRODUCED if difference["low"] > -LESS else UNSEEN,
    )


def _change(row: dict[str, Any]) -> str:
    change = row["difference"]
    return f"{change['mean']:+.2f} ({change['low']:+.2f} to {change['high']:+.2f})"


CLAIMS = (
    Claim("H2O", "up to 29 x over Accelerate, 3 x over FlexGen, at a fifth of the cache", throughput),
    Claim("H2O", "29 x over DeepSpeed and Accelerate, here with grouped heads", throughput_of_groups),
    Claim("H2O", "up to 1.9 x less latency at one batch", latency),
    Claim("H2O", "more than 95 % of the attention is below 1 % of its row's largest, in nearly all layers", sparsity),
    Claim("H2O", "heavy hitters are words that co-occur with many", cooccurrence),
    Claim("H2O", "a query looks at heavy hitters", argmax),
    Claim("H2O", "without the heavy hitters a model breaks", heavy_hitters_carry),
    Claim("H2O", "a fifth of the cache loses next to nothing", a_fifth_is_enough),
    Claim("H2O", "choice tasks keep their accuracy at 20 %", choices),
)
