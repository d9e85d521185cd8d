"""Claims about number formats, tried by KL on windows of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from generated.claims.form import CONTRADICTED, NO_LOSS, PARTLY, REPRODUCED, Claim, Tried
from generated.results import read


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


CLAIMS = (
    Claim("KVQuant", "3 bits cost less than 0.1 of perplexity", kvquant),
    Claim("ThinK", "40 % of the key channels leave without loss", think),
    Claim("MiKV", "few bits in place of evicting keep what eviction loses, in as many bytes", mikv),
)
