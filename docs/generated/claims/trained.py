"""Claims of heads and gates that are trained for a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from generated.claims.form import REPRODUCED, UNSEEN, Claim, Tried
from generated.results import read


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


CLAIMS = (
    Claim("Locret", "trained heads keep more than scores that need no training", trained("locret")),
    Claim("Attention-Gate", "trained gates keep more than scores that need no training", trained("attention_gate")),
)
