"""Claims about serving: batches, shared beginnings, stored chunks, layouts of devices, paging."""

from __future__ import annotations

import numpy as np

from generated.claims.form import CONTRADICTED, PARTLY, REPRODUCED, Claim, Tried
from generated.results import read


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
    Claim("BatchLLM", "1.1 to 2 x by common beginnings and a planned order", batch),
    Claim("ChunkAttention", "3.2 to 4.8 x attention over shared prompts, 1.6 to 2.3 x end to end", shared_attention),
    Claim("Cache-Craft", "75 % less is computed, and answers stay", chunks_computed),
    Claim("Cache-Craft", "2 x less latency", chunks_first_token),
    Claim("DistServe", "prompts apart from answers serve up to 7.4 x the requests, or 12.6 x tighter limits", split),
    Claim(
        "Paging with Succinct Predictions", "a bit a block comes near the optimum, and wrong bits cost little", paging
    ),
)
