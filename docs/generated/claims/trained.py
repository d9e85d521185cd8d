"""Claims of heads and gates that are trained for a model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from generated.claims.form import ALL, CONTRADICTED, PARTLY, REPRODUCED, UNSEEN, Claim, Tried, found_share, over_windows
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
            f"{found_share(own)} of facts found, the full cache {found_share(full)}, `{best['method']}` "
            f"{found_share(best)}",
            f"{own['bytes']:.0%}, `{best['method']}` {best['bytes']:.0%}",
            f"SmolLM2-135M, {own['questions']} questions on {own['contexts']} contexts of 1,024",
            "retain-real-recall.md",
            "benchmarks/quality/retain_real.sh",
            REPRODUCED if own["score"]["low"] > best["score"]["high"] else UNSEEN,
        )

    return tried


#: Rows of gates with an adapter, and of an adapter alone, up to the seed; a window of all entries keeps them all.
_GATED, _ALONE = "attention_gate:gate=gated-", "attention_gate:gate=lora-"


def beside_lora() -> Tried:
    """Facts found with gates and an adapter trained together, and with an adapter that was trained alone as long."""
    rows = {row["method"]: row for row in read("gate-lora")}
    full = rows["full"]
    seeds = sorted(name.removeprefix(_GATED) for name in rows if name.startswith(_GATED))
    gated = [rows[f"{_GATED}{seed}"] for seed in seeds]
    alone = [rows[f"{_ALONE}{seed}:window=4096"] for seed in seeds]
    held = [f"{row['bytes']:.0%}" for row in gated]
    pairs = list(zip(gated, alone, strict=True))
    ahead = [own["score"]["low"] > other["score"]["high"] for own, other in pairs]
    behind = [own["score"]["high"] < other["score"]["low"] for own, other in pairs]
    return Tried(
        f"facts found, {len(seeds)} seeds each: gates and adapter {'; '.join(map(found_share, gated))}, the adapter "
        f"alone {'; '.join(map(found_share, alone))}, the model as it is {found_share(full)}",
        f"{', '.join(held)}; the adapter alone {alone[0]['bytes']:.0%}",
        f"SmolLM2-135M, 40 steps each, rank 8, {full['questions']} questions on {full['contexts']} contexts of 1,024",
        "gate-lora.json",
        "benchmarks/quality/retain_real.sh",
        REPRODUCED if all(ahead) else CONTRADICTED if all(behind) else PARTLY if not any(behind) else UNSEEN,
    )


#: Settings of the table of Locret, by what they are called there.
TABLE = {
    "full": "full cache",
    "full/int4": "int4",
    "full/rotated4": "rotated4",
    "minference:ratio=0.2": "MInference",
    "infllm@20%": "InfLLM 20 %",
    "sirllm@20%": "SirLLM 20 %",
    "sirllm@5%": "SirLLM 5 %",
    "locret:heads=heads.safetensors:prefill=chunks@20%": "Locret 20 %",
    "locret:heads=heads.safetensors:prefill=chunks@5%": "Locret 5 %",
    "locret:heads=heads.safetensors:prefill=chunks@20%/rotated4": "Locret 20 % in rotated4",
    "merge_on_evict:score=locret/heads=heads.safetensors@20%": "Locret 20 % that merges, evicting at the end",
}


def reading() -> Tried:
    """Facts found, the peak and the seconds of reading, of Locret and what its paper has beside it."""
    data = read("reading-table")
    rows, load = data["settings"], data["load"]
    found = {name: over_windows([one / load["facts"] for one in row["found"]]) for name, row in rows.items()}
    best = "locret:heads=heads.safetensors:prefill=chunks@20%"
    others = [name for name in TABLE if name.startswith(("infllm", "sirllm", "minference", "full/int4"))]
    base = float(np.median(rows["full"]["cpu_s"]))
    each = [
        f"{says} {found[name].mean:.2f} ({found[name].low:.2f} to {found[name].high:.2f}), "
        f"{max(rows[name]['peak']):.0%}, {np.median(rows[name]['cpu_s']) / base:.2f} x"
        for name, says in TABLE.items()
    ]
    peak = max(rows[best]["peak"])
    smaller = [name for name in others if max(rows[name]["peak"]) <= peak]
    beaten = [name for name in smaller if found[name].low > found[best].high]
    close = found[best].mean >= ALL * found["full"].mean
    return Tried(
        f"facts found, peak of the cache's bytes, CPU seconds of reading over the full cache's: {'; '.join(each)}",
        "beside each",
        f"{load['model']}, {load['facts'] * len(rows['full']['found'])} questions on {len(rows['full']['found'])} "
        f"contexts of {load['length']:,}",
        "reading-table.json",
        "benchmarks/quality/reading_table.py",
        CONTRADICTED if beaten else REPRODUCED if close else PARTLY,
    )


CLAIMS = (
    Claim("Locret", "trained heads keep more than scores that need no training", trained("locret")),
    Claim(
        "Locret",
        "as many answers as the full cache at a smaller peak than InfLLM, SirLLM, MInference and quantization",
        reading,
    ),
    Claim("Attention-Gate", "trained gates keep more than scores that need no training", trained("attention_gate")),
    Claim("Attention-Gate", "with an adapter, more accurate than the adapter alone, and 60 % evicted", beside_lora),
)
