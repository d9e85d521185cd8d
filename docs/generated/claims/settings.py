"""Claims about what settings keep in as many bytes, tried by KL on the same windows of texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from generated.claims.form import (
    CONTRADICTED,
    PARTLY,
    REPRODUCED,
    SEED,
    Claim,
    Tried,
    ahead,
    of_all,
    over_windows,
    shown,
    verdict,
)
from generated.results import read

#: The most that two measures of one divergence may differ by, as a share of it.
APART = 0.02
#: A setting of the paper's, and those that it is said to be ahead of, in as many bytes.
Sides = tuple[str, tuple[str, ...]]


def losses(own: dict[str, Any], *settings: str) -> list[list[float]]:
    """The KL of each setting on the windows that all of them have."""
    found = []
    for setting in settings:
        found.append(
            [
                one
                for text, row in own["settings"][setting].items()
                for one in row["kl"][: min(len(own["settings"][other][text]["kl"]) for other in settings)]
            ]
        )
    return found


def share(own: dict[str, Any], setting: str) -> float:
    """The mean share of the bytes that a setting holds."""
    return over_windows([one for row in own["settings"][setting].values() for one in row["bytes"]]).mean


def _keys() -> Tried:
    """How much the similarity of neighbouring keys differs between layers, and between texts."""
    parts, verdicts = [], []
    for name, own in read("key-similarity")["models"].items():
        values = np.array([text["beside"] for text in own["texts"].values()])  # texts, windows, layers
        drawn = np.mean([text["random"] for text in own["texts"].values()])
        places = np.random.default_rng(SEED).integers(0, values.shape[1], (2000, len(values), values.shape[1]))
        found = [_spreads(np.take_along_axis(values, place[..., None], 1)) for place in places]
        layers, texts = _spreads(values)
        low, high = np.quantile([one / other for one, other in found], (0.025, 0.975))
        parts.append(
            f"{name} cosine {values.mean():.2f}, of keys at random {drawn:.2f}; deviation over layers {layers:.3f}, "
            f"over texts {texts:.3f}, {layers / texts:.1f} ({low:.1f} to {high:.1f}) x as much"
        )
        verdicts.append(verdict(low - 1, high - 1, 0.0) if values.mean() > drawn else CONTRADICTED)
        windows = f"{own['windows']} windows of {own['length']:,} of each of {len(values)} texts"
    return Tried(
        "; ".join(parts),
        "full cache",
        windows,
        "key-similarity.json",
        "benchmarks/quality/key_similarity.py",
        of_all(verdicts),
    )


def _spreads(values: Any) -> tuple[float, float]:
    """The deviation over layers within a text, and over texts within a layer, of (texts, windows, layers)."""
    means = values.mean(1)
    return float(means.std(1, ddof=1).mean()), float(means.std(0, ddof=1).mean())


def beside(*sides: Sides) -> Callable[[], Tried]:
    """Settings beside others in as many bytes: the verdict is of the differences over windows, of all pairs."""

    def tried() -> Tried:
        models = read("setting-texts")["models"]
        parts, held, verdicts, counts = [], [], [], []
        for name, own in models.items():
            known = [side for side in sides if all(one in own["settings"] for one in (side[0], *side[1]))]
            for first, others in known:
                mine, *theirs = losses(own, first, *others)
                leads = [ahead(mine, loss) for loss in theirs]
                each = ", ".join(
                    f"`{_short(other)}` {over_windows(loss).mean:.3f}, more by {shown(lead)}"
                    for other, loss, lead in zip(others, theirs, leads, strict=True)
                )
                parts.append(f"`{_short(first)}` {shown(over_windows(mine))}, {each}")
                held.append(" and ".join(f"{share(own, one):.1%}" for one in (first, *others)))
                verdicts += [verdict(lead.low, lead.high, 0.0) for lead in leads]
            if known:
                counts.append(f"{name}, {len(mine)} windows of {own['prompt']:,} of three texts")
        if not verdicts:
            raise SystemExit(f"setting-texts.json has no rows of {sides[0][0]} and what it is beside")
        return Tried(
            f"KL in nats a token: {'; '.join(parts)}",
            "; ".join(held),
            " and ".join(counts),
            "setting-texts.json",
            "benchmarks/quality/setting_texts.py",
            of_all(verdicts),
        )

    return tried


def _short(setting: str) -> str:
    """A setting without that whose bytes it has."""
    return setting.partition("@=")[0]


def _fastgen(*thresholds: str) -> list[Sides]:
    each = [f"fastgen:threshold={threshold}" for threshold in thresholds]
    return [(one, (f"h2o@={one}",)) for one in each]


#: Rules of heads, and the share of heads that should keep theirs.
RULES, SAME = 5, 0.9


def persistence() -> Tried:
    """Heads whose rule at the prompt's end is the one after more tokens, and how many would be by their shares."""
    rows = read("fastgen-persistence")["rows"]
    parts, verdicts = [], []
    for name, says in (("all 64", "64 tokens later"), ("all 256", "256 later"), ("new 256", "of those 256 alone")):
        counts = [np.array(one).reshape(RULES, RULES) for row in rows for one in row["pairs"][name]]
        found = over_windows([np.trace(one) / one.sum() for one in counts])
        chance = over_windows([one.sum(0) @ one.sum(1) / one.sum() ** 2 for one in counts]).mean
        parts.append(f"{says} {found.mean:.0%} ({found.low:.0%} to {found.high:.0%}), by chance {chance:.0%}")
        verdicts.append(REPRODUCED if found.low >= SAME else PARTLY if found.low > chance else CONTRADICTED)
    texts = ", ".join(f"{row['text'].partition('.')[0]} {_same(row):.0%}" for row in rows)
    full = np.mean([one[-1].sum() / one.sum() for one in counts])
    return Tried(
        f"heads with the same rule: {'; '.join(parts)} ({texts}); {full:.0%} of the heads keep everything at first",
        "full cache",
        f"{rows[0]['model']}, T {rows[0]['threshold']:g}, {len(counts)} windows of 768 + 256",
        "fastgen-persistence.json",
        "benchmarks/quality/fastgen_persistence.py",
        verdicts[-1],
    )


def _same(row: dict[str, Any]) -> float:
    """Of a text the share of heads whose rule is that of the newest 256 tokens too."""
    return float(np.mean([np.trace(np.array(one).reshape(RULES, RULES)) / sum(one) for one in row["pairs"]["new 256"]]))


def by_masks() -> str:
    """How far what settings lose without a cache is from what they lose with one, and whether verdicts stay.

    Raises:
        SystemExit: too far, where both choose the same entries; or another verdict.
    """
    rows = read("setting-texts")["models"]
    apart: dict[str, list[float]] = {}
    leads = []
    for name, masked in read("masked-kl")["models"].items():
        own = rows[name]
        for setting, row in masked["settings"].items():
            method = setting.partition("@")[0].partition(":")[0]
            for text, values in row.items():
                pairs = zip(values["kl"], own["settings"][setting][text]["kl"], strict=False)
                apart.setdefault(method, []).extend(abs(one - other) / other for one, other in pairs)
        first, *others = (one for one in masked["settings"] if "fastgen" in one)
        for other in others:
            lead, by_cache = (ahead(*losses(one, first, other)) for one in (masked, own))
            found, with_cache = (verdict(one.low, one.high, 0.0) for one in (lead, by_cache))
            if found != with_cache:
                raise SystemExit(f"masked-kl.json and setting-texts.json differ about {first} and {other}")
            leads.append(f"`{_short(first)}` loses {shown(lead)} nats a token less than `{_short(other)}` ({found})")
    if max(apart["h2o"]) > APART:
        raise SystemExit(
            f"masked-kl.json and setting-texts.json differ by {max(apart['h2o']):.1%} with h2o: one of them is wrong"
        )
    most = [f"`{method}` {max(found):.0%}" for method, found in apart.items() if method != "h2o"]
    return (
        "KL of these settings in as many bytes was measured a second time: by masks over the attention of plain "
        "transformers, without a cache, and with entries chosen from its weights "
        "([rows](../../benchmarks/results/masked-kl.json), `benchmarks/quality/masked_kl.py`).\n"
        f"The verdicts are the same: {'; '.join(leads)}.\n"
        f"Windows: {len(apart['h2o'])}.\n"
        f"`h2o` differs by at most {max(apart['h2o']):.2%}, the others by at most {', '.join(most)}: rules of "
        "`fastgen` come from all queries there and from 128 in the cache, and "
        "`streaming` closes the gap behind the sinks in the cache alone.\n"
    )


CLAIMS = (
    Claim(
        "FastGen", "rules of each head keep more than H2O in as many bytes", beside(*_fastgen("0.91", "0.95", "0.98"))
    ),
    Claim("FastGen", "the structure of a head's attention stays while a text goes on", persistence),
    Claim(
        "FastGen",
        "rules of each head keep more than a window in as many bytes",
        beside(("fastgen:threshold=0.95", ("streaming@=fastgen:threshold=0.95",))),
    ),
    Claim(
        "KVMerger",
        "merging keeps more than H2O and CaM, at 50 and 35 %",
        beside(("kvmerger@512", ("h2o@512", "cam@512")), ("kvmerger@352", ("h2o@352", "cam@352"))),
    ),
    Claim("KVMerger", "neighbouring keys are alike, more by the layer than by the text", _keys),
    Claim(
        "ThinK",
        "over SnapKV and H2O, fewer channels keep more than fewer entries",
        beside(
            ("snapkv@512/think", ("snapkv@448",)),
            ("snapkv@512/think:0.5", ("snapkv@384",)),
            ("h2o@512/think", ("h2o@448",)),
            ("h2o@512/think:0.5", ("h2o@384",)),
        ),
    ),
)
