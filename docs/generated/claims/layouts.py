"""Claims about layouts of devices, and about paging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from generated.claims.form import CONTRADICTED, PARTLY, REPRODUCED, Claim, Tried, figure, verdict
from generated.results import read


def _middle(values: Sequence[float]) -> float:
    return float(np.mean(values))


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
        f"at most {figure(vllm)} x those of vLLM's step times together, where apart keeps the paper's limits, and "
        f"{figure(same)} x those of the same kernels together; at {most[1]:g} requests a second and device, more than "
        f"vLLM's times can serve, {figure(beyond, 0)} x",
        verdict(min(vllm) - 1, max(vllm) - 1, 12.6 - 1),
    )


def goodput() -> Tried:
    """Goodput with prompts apart from answers, beside vLLM's step times."""
    apart, same, vllm = (_best(kind, False) for kind in (APART, SAME, VLLM))
    at = next(iter(vllm))
    over_vllm, over_same = ([a / b for a, b in zip(apart[at], other[at], strict=True)] for other in (vllm, same))
    return _layouts_tried(
        f"requests a second and device {figure(over_vllm)} x those of vLLM's step times together, and "
        f"{figure(over_same)} x those of the same kernels together",
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


CLAIMS = (
    Claim("DistServe", "prompts apart from answers serve more requests", split),
    Claim("DistServe", "they serve up to 7.4 x the requests of vLLM", goodput),
    Claim("DistServe", "they keep up to 12.6 x tighter limits than vLLM", tighter_limits),
    Claim(
        "Paging with Succinct Predictions", "a bit a block comes near the optimum, and wrong bits cost little", paging
    ),
)
