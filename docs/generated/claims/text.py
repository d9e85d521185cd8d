"""Rows of perplexity on text, and claims of methods that are tried beside `h2o` on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from generated.claims.form import (
    CONTRADICTED,
    NO_LOSS,
    PARTLY,
    REPRODUCED,
    UNSEEN,
    Claim,
    Tried,
    over_windows,
    shown,
    within,
)
from generated.results import read

WIKITEXT = "text:path=wikitext2_test.txt:context_len=1024:continuation_len=64:stride=1088"


def of_text(method: str, budget: str, codec: str = "auto") -> dict[str, Any]:
    """A row of perplexity on WikiText-2."""
    wanted = (WIKITEXT, method, budget, codec)
    return next(row for row in read("real-text") if (row["task"], row["method"], row["budget"], row["codec"]) == wanted)


def beside_h2o(method: str, *budgets: str) -> Callable[[], Tried]:
    """A method beside h2o on text; equal budgets, intervals that overlap show no difference."""

    def tried() -> Tried:
        pairs = [(of_text(method, budget), of_text("h2o", budget)) for budget in budgets]
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


def fastgen() -> Tried:
    """What leaves, and what it costs, by the attention that heads must keep."""
    rows = read("fastgen-thresholds")["rows"]
    losses = [over_windows([one for text in row["kl"]["auto"].values() for one in text]) for row in rows]
    held = [row["bytes"]["auto"] for row in rows]
    each = [
        f"T {row['method'].rpartition('=')[2]}: {1 - share:.0%} evicted, {shown(loss)}"
        for row, share, loss in zip(rows, held, losses, strict=True)
    ]
    found = [within(loss, NO_LOSS) for loss in losses]
    free = [share for share, one in zip(held, found, strict=True) if one == REPRODUCED]
    most_evicted = found[held.index(min(held))]
    return Tried(
        f"KL in nats a token: {'; '.join(each)}",
        f"{min(held):.0%} to {max(held):.0%}",
        f"SmolLM2-135M, {rows[0]['windows']} windows of {rows[0]['prompt']:,} of each of three texts",
        "fastgen-thresholds.json",
        "benchmarks/quality/paper_rows.sh",
        REPRODUCED if free and min(free) <= 0.6 else PARTLY if free else most_evicted,
    )


CLAIMS = (
    Claim("FastGen", "40 % of a cache leaves without loss, by rules of each head", fastgen),
    Claim("Ada-KV", "heads that compete keep more than equal heads", beside_h2o("ada:score=h2o", "50%", "20%")),
    Claim("KVMerger", "merging keeps more than H2O evicting, at 50 %", beside_h2o("kvmerger", "50%", "20%")),
    Claim("EMS", "evicting and merging keep more than H2O", beside_h2o("ems", "20%")),
)
