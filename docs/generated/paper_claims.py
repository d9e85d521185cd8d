"""What papers claim, and what came out when it was tried here: a table from committed rows.

A verdict follows from the rows: *reproduced* where the figure, or the whole interval, is on the claim's side; *partly*
where the direction is the paper's and the size is not; *contradicted* where the whole interval is on the other side;
*no difference seen* where it holds both. What has not been run has the command that runs it.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from generated.results import RESULTS, read
from millpond_lab.bench.common.report import markdown_table

WIKITEXT = "text:path=wikitext2_test.txt:context_len=1024:continuation_len=64:stride=1088"
#: KL in nats a token that counts as no loss: a hundredth of the perplexity.
NO_LOSS = 0.01
REPRODUCED, PARTLY, CONTRADICTED, UNSEEN = "reproduced", "partly", "contradicted", "no difference seen"


@dataclass(frozen=True, slots=True)
class Tried:
    """What came out: the figure with its interval, the bytes, the model, the rows and their script, and the verdict."""

    figure: str
    bytes: str
    model: str
    rows: str
    script: str
    verdict: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a paper, and how it was tried; `tried` is the command that tries it where nothing has been run."""

    paper: str
    says: str
    tried: Callable[[], Tried] | str


def verdict(low: float, high: float, wanted: float) -> str:
    """Of a figure that should be above 0, and that the paper has as `wanted`.

    Example:
        >>> verdict(2.0, 3.0, 1.9), verdict(0.5, 3.0, 1.9), verdict(-1.0, 1.0, 1.9), verdict(-2.0, -1.0, 1.9)
        ('reproduced', 'partly', 'no difference seen', 'contradicted')
    """
    if high < 0:
        return CONTRADICTED
    if low <= 0:
        return UNSEEN
    return REPRODUCED if low >= wanted else PARTLY


# ---------------------------------------------------------------------- H2O


def throughput() -> Tried:
    """Tokens a second from a disk, at one limit of memory."""
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
        PARTLY,
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
    row = _text("h2o", "20%")
    return Tried(
        f"perplexity {row['more']:+.1%} ({row['low']:+.1%} to {row['high']:+.1%})",
        f"{row['bytes']:.0%}",
        f"SmolLM2-135M, {row['windows']} windows of WikiText-2",
        "real-text.md",
        "benchmarks/quality/real_text.py",
        CONTRADICTED if row["low"] > 0.05 else REPRODUCED,
    )


# ---------------------------------------------------------------------- text


def _text(method: str, budget: str, codec: str = "auto") -> dict[str, Any]:
    wanted = (WIKITEXT, method, budget, codec)
    return next(row for row in read("real-text") if (row["task"], row["method"], row["budget"], row["codec"]) == wanted)


def beside_h2o(method: str, *budgets: str) -> Callable[[], Tried]:
    """A method beside h2o on text; equal budgets, intervals that overlap show no difference."""

    def tried() -> Tried:
        pairs = [(_text(method, budget), _text("h2o", budget)) for budget in budgets]
        shown = [
            f"{budget}: {own['more']:+.1%} ({own['low']:+.1%} to {own['high']:+.1%}), `h2o` {h2o['more']:+.1%} "
            f"({h2o['low']:+.1%} to {h2o['high']:+.1%})"
            for budget, (own, h2o) in zip(budgets, pairs, strict=True)
        ]
        ahead = [own["high"] < h2o["low"] for own, h2o in pairs]
        behind = [own["low"] > h2o["high"] for own, h2o in pairs]
        return Tried(
            "perplexity at " + "; at ".join(shown),
            " and ".join(f"{own['bytes']:.0%}" for own, _ in pairs),
            f"SmolLM2-135M, {pairs[0][0]['windows']} windows of WikiText-2",
            "real-text.md",
            "benchmarks/quality/real_text.py",
            REPRODUCED if all(ahead) else CONTRADICTED if all(behind) else UNSEEN,
        )

    return tried


def codec_loss(judge: Callable[[Sequence[float], Sequence[float]], str], *names: str, method: str = "full") -> Tried:
    """KL of formats on a real model; the verdict is of their means and their shares of the bytes."""
    row = next(row for row in read("codec-papers")["rows"] if row["method"] == method and names[0] in row["kl"])
    means = [float(np.mean([one for text in row["kl"][name].values() for one in text])) for name in names]
    held = [row["bytes"][name] for name in names]
    shown = ", ".join(f"`{name}` {mean:.3f}" for name, mean in zip(names, means, strict=True))
    under = f", `{method}` at {row['budget']}" if row["budget"] else ""
    return Tried(
        f"KL in nats a token{under}: {shown}; no interval",
        ", ".join(f"{share:.0%}" for share in held),
        f"SmolLM2-135M, {row['windows']} windows of {row['prompt']:,} of each of three texts",
        "codec-papers.json",
        "benchmarks/quality/codec_texts.py",
        judge(means, held),
    )


def kvquant() -> Tried:
    """Three bits before RoPE, with the paper's own outliers; 0.1 is a two hundredth of this model's perplexity."""
    names = ("kvquant4_paper", "kvquant3_paper", "kvquant2_paper")
    return codec_loss(lambda means, _: REPRODUCED if means[1] < NO_LOSS / 2 else PARTLY, *names)


def think() -> Tried:
    """Key channels left out."""
    return codec_loss(
        lambda means, _: REPRODUCED if means[1] <= NO_LOSS else PARTLY if means[0] <= NO_LOSS else CONTRADICTED,
        "think",
        "think:0.5",
    )


def mikv() -> Tried:
    """Few bits for what would be evicted, beside evicting it: in as many bytes, and in more."""

    def judge(means: Sequence[float], held: Sequence[float]) -> str:
        better = [share for mean, share in zip(means[1:], held[1:], strict=True) if mean < means[0]]
        alike = [share for share in better if share <= 1.05 * held[0]]
        return REPRODUCED if alike else PARTLY if better else CONTRADICTED

    return codec_loss(judge, "bf16", "int8_mikv", "int8_mikv3", "int8_mikv4", method="h2o")


def fastgen() -> Tried:
    """What leaves, and what it costs, by the attention that heads must keep."""
    rows = read("fastgen-thresholds")["rows"]
    shown, held, losses = [], [], []
    for row in rows:
        means = [float(np.mean(text)) for text in row["kl"]["auto"].values()]
        losses.append(float(np.mean(means)))
        held.append(row["bytes"]["auto"])
        shown.append(f"T {row['method'].rpartition('=')[2]}: {1 - held[-1]:.0%} evicted, {losses[-1]:.3f}")
    free = [share for share, loss in zip(held, losses, strict=True) if loss <= NO_LOSS]
    return Tried(
        f"KL in nats a token: {'; '.join(shown)}; no interval",
        f"{min(held):.0%} to {max(held):.0%}",
        f"SmolLM2-135M, {rows[0]['windows']} windows of {rows[0]['prompt']:,} of each of three texts",
        "fastgen-thresholds.json",
        "benchmarks/quality/paper_rows.sh",
        REPRODUCED if free and min(free) <= 0.6 else PARTLY if free else CONTRADICTED,
    )


# ---------------------------------------------------------------------- trained heads


def trained(method: str) -> Callable[[], Tried]:
    """Facts found by what was trained for the model, beside the best score that reads once and needs no training."""

    def tried() -> Tried:
        rows = read("retain-real-recall")
        full = next(row for row in rows if row["method"] == "full")
        alike = (("20%", "auto"), ("", "auto"))
        own = next(row for row in rows if row["method"].startswith(method) and (row["budget"], row["codec"]) in alike)
        best = max(
            (row for row in rows if row["method"] in ("h2o", "snapkv", "keydiff") and row["budget"] == "20%"),
            key=lambda row: row["score"]["mean"],
        )
        return Tried(
            f"{_share(own)} of facts found, the full cache {_share(full)}, `{best['method']}` {_share(best)}",
            f"{own['bytes']:.0%}, `{best['method']}` {best['bytes']:.0%}",
            f"SmolLM2-135M, {own['questions']} questions on {own['contexts']} contexts of 1,024",
            "retain-real-recall.md",
            "benchmarks/quality/retain_real.sh",
            REPRODUCED if own["score"]["low"] > best["score"]["high"] else UNSEEN,
        )

    return tried


def _share(row: dict[str, Any]) -> str:
    score = row["score"]
    return f"{score['mean']:.2f} ({score['low']:.2f} to {score['high']:.2f})"


# ---------------------------------------------------------------------- serving


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


def shared_attention() -> Tried:
    """Attention over entries that all sequences share."""
    rows = {row["name"]: row for row in read("kernels")["results"]}
    found = rows["32 x 2048, MHA, 8 heads of 128, 100% shared"]
    return Tried(
        f"attention alone: {found['share']:.1f} x each sequence alone, median of 16 rounds; end to end not run",
        "the shared entries once",
        "32 sequences of 2,048 entries, 8 heads of 128",
        "kernels.md",
        "millpond bench kernels",
        PARTLY,
    )


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


def paging() -> Tried:
    """Hit rates with right and with wrong bits."""
    rate = {row["rule"]: row["hit_rate"] for row in read("paging-bits")["results"]}
    right = rate["mark0, Belady's bits"]
    wrong = min(value for name, value in rate.items() if name.startswith("learned"))
    return Tried(
        f"hits of the optimum's bits {right:.4f}, with 20 % of them wrong "
        f"{rate['mark0, 20 % of them flipped']:.4f}, LRU {rate['lru']:.4f}; `learned` with any wrong bits at least "
        f"{wrong:.4f}",
        "6,000 blocks",
        "Mooncake's conversation trace, 12,031 requests",
        "paging-bits.md",
        "millpond bench paging",
        REPRODUCED if rate["mark0, 20 % of them flipped"] > rate["lru"] else PARTLY,
    )


CLAIMS = (
    Claim("H2O", "29 x over Accelerate and DeepSpeed, 3 x over FlexGen, at a fifth of the cache", throughput),
    Claim("H2O", "up to 1.9 x less latency at one batch", "`benchmarks/gpu/run_all.py`"),
    Claim("H2O", "more than 95 % of the attention is below 1 % of its row's largest, in nearly all layers", sparsity),
    Claim("H2O", "heavy hitters are words that co-occur with many", cooccurrence),
    Claim("H2O", "a query looks at heavy hitters", argmax),
    Claim("H2O", "without the heavy hitters a model breaks", heavy_hitters_carry),
    Claim("H2O", "a fifth of the cache loses next to nothing", a_fifth_is_enough),
    Claim(
        "H2O", "choice tasks keep their accuracy at 20 %", "`millpond eval --tasks h2o_choice:path=FILE --method h2o`"
    ),
    Claim("FastGen", "40 % of a cache leaves without loss, by rules of each head", fastgen),
    Claim("Ada-KV", "heads that compete keep more than equal heads", beside_h2o("ada:score=h2o", "50%", "20%")),
    Claim("KVMerger", "merging keeps more than H2O evicting, at 50 %", beside_h2o("kvmerger", "50%", "20%")),
    Claim("EMS", "evicting and merging keep more than H2O", beside_h2o("ems", "20%")),
    Claim("KVQuant", "3 bits cost less than 0.1 of perplexity", kvquant),
    Claim("ThinK", "40 % of the key channels leave without loss", think),
    Claim("MiKV", "few bits in place of evicting keep what eviction loses, in as many bytes", mikv),
    Claim("Locret", "trained heads keep more than scores that need no training", trained("locret")),
    Claim("Attention-Gate", "trained gates keep more than scores that need no training", trained("attention_gate")),
    Claim("BatchLLM", "1.1 to 2 x by common beginnings and a planned order", batch),
    Claim("ChunkAttention", "3.2 to 4.8 x attention over shared prompts, 1.6 to 2.3 x end to end", shared_attention),
    Claim("Cache-Craft", "75 % less is computed, and answers stay", chunks_computed),
    Claim("Cache-Craft", "2 x less latency", chunks_first_token),
    Claim("DistServe", "prompts apart from answers serve up to 7.4 x the requests, or 12.6 x tighter limits", split),
    Claim(
        "Paging with Succinct Predictions", "a bit a block comes near the optimum, and wrong bits cost little", paging
    ),
)

INTRODUCTION = """\
The same comparisons, tried on models that are at hand; verdicts follow from the rows.
*Partly*: the paper's direction without its size, or a part of the claim.
*Contradicted*: the other direction, beyond the interval.
These models are small: a verdict is about them, not about the paper's.
There are [more pairs of methods](../explanation/orderings.md) on a model of our own, and
[orders of the newest](../board.md#orders-that-papers-state) on two real ones.
"""


def claims_table(claims: Sequence[Claim] = CLAIMS) -> str:
    """The table of all claims."""
    head = ("paper", "it says", "here", "bytes", "model", "rows, script", "verdict")
    return markdown_table(head, [_line(claim) for claim in claims])


def _line(claim: Claim) -> tuple[str, ...]:
    if isinstance(claim.tried, str):
        return claim.paper, claim.says, "", "", "", claim.tried, "not run yet"
    found = claim.tried()
    where = f"[{found.rows}](../../benchmarks/results/{found.rows}), `{found.script}`"
    return claim.paper, claim.says, found.figure, found.bytes, found.model, where, found.verdict
