"""Claims about number formats, tried by KL on windows of texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from generated.claims import settings as judged
from generated.claims.form import (
    CONTRADICTED,
    NO_LOSS,
    PARTLY,
    REPRODUCED,
    Claim,
    Tried,
    ahead,
    of_all,
    over_windows,
    shown,
    verdict,
    within,
)
from generated.results import read

#: Of each format the KL of every window.
Losses = Sequence[Sequence[float]]


def codec_loss(judge: Callable[[Losses, Sequence[float]], str], *names: str, method: str = "full") -> Tried:
    """KL of formats on a real model; the verdict is of their windows and their shares of the bytes."""
    row = next(row for row in read("codec-papers")["rows"] if row["method"] == method and names[0] in row["kl"])
    losses = [[one for text in row["kl"][name].values() for one in text] for name in names]
    held = [row["bytes"][name] for name in names]
    each = ", ".join(f"`{name}` {shown(over_windows(own))}" for name, own in zip(names, losses, strict=True))
    under = f", `{method}` at {row['budget']}" if row["budget"] else ""
    return Tried(
        f"KL in nats a token{under}: {each}",
        ", ".join(f"{share:.0%}" for share in held),
        f"SmolLM2-135M, {row['windows']} windows of {row['prompt']:,} of each of three texts",
        "codec-papers.json",
        "benchmarks/quality/codec_texts.py",
        judge(losses, held),
    )


def kvquant() -> Tried:
    """Three bits before RoPE, with the paper's own outliers; 0.1 is a two hundredth of this model's perplexity."""
    names = ("kvquant4_paper", "kvquant3_paper", "kvquant2_paper")
    return codec_loss(lambda losses, _: within(over_windows(losses[1]), NO_LOSS / 2), *names)


def think() -> Tried:
    """Key channels left out: a quarter, and half of them."""

    def judge(losses: Losses, held: Sequence[float]) -> str:
        quarter, half = (within(over_windows(own), NO_LOSS) for own in losses)
        return REPRODUCED if half == REPRODUCED else PARTLY if quarter == REPRODUCED else quarter

    return codec_loss(judge, "think", "think:0.5")


def mikv() -> Tried:
    """Few bits for what would be evicted, beside evicting it: in as many bytes, and in more."""

    def judge(losses: Losses, held: Sequence[float]) -> str:
        better = [share for own, share in zip(losses[1:], held[1:], strict=True) if ahead(own, losses[0]).low > 0]
        alike = [share for share in better if share <= 1.05 * held[0]]
        return REPRODUCED if alike else PARTLY if better else CONTRADICTED

    return codec_loss(judge, "bf16", "int8_mikv", "int8_mikv3", "int8_mikv4", method="h2o")


#: What each step of KVQuant's ladder is called, in the order in which it is climbed.
STEPS = {
    "int": "integers of tokens",
    "channel": "keys by channels",
    "pre_rope": "before RoPE",
    "nuq": "tables",
    "outliers": "1 % apart",
    "sink": "first entry",
}


def ladder() -> Tried:
    """KVQuant's steps, each beside the one before it on the same windows."""
    parts, held, verdicts, models = [], [], [], []
    for name, own in read("kvquant-ladder")["models"].items():
        for bits in (3, 2):
            settings = [f"full/kvquant{bits}_{step}" for step in STEPS]
            kl = judged.losses(own, *settings)
            leads = [ahead(more, less) for less, more in itertools.pairwise(kl)]
            verdicts += [verdict(lead.low, lead.high, 0.0) for lead in leads]
            first, *later = (
                f"{says} {over_windows(one).mean:.3f}" for says, one in zip(STEPS.values(), kl, strict=True)
            )
            steps = [
                f"{says} (less by {lead.low:.3f} to {lead.high:.3f})" for says, lead in zip(later, leads, strict=True)
            ]
            parts.append(f"{name} {bits} bits: {', '.join([first, *steps])}")
            shares = [judged.share(own, one) for one in settings]
            held.append(f"{', '.join(f'{one:.0%}' for one in shares)}: {1 / shares[-1]:.1f} x the tokens in one memory")
        models.append(f"{name}, {len(kl[0])} windows of {own['prompt']:,} of three texts")
    return Tried(
        f"KL in nats a token; {'; '.join(parts)}",
        "; ".join(held),
        " and ".join(models),
        "kvquant-ladder.json",
        "benchmarks/quality/kvquant_ladder.py",
        of_all(verdicts),
    )


CLAIMS = (
    Claim("KVQuant", "3 bits cost less than 0.1 of perplexity", kvquant),
    Claim("KVQuant", "each step keeps more: channels, before RoPE, tables, outliers, the first entry", ladder),
    Claim("ThinK", "40 % of the key channels leave without loss", think),
    Claim("MiKV", "few bits in place of evicting keep what eviction loses, in as many bytes", mikv),
)
