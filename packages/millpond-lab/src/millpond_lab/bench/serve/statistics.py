"""Numbers of a run from the times of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millpond.errors import OptionError
from millpond_lab.bench.serve.client import RequestOutcome

#: Latencies that a service level may name.
LEVELS = ("ttft", "tpot", "e2e")
PERCENTILES = (50, 90, 99)


def parse_levels(text: str | None) -> dict[str, float]:
    """Seconds by name, from "ttft=2,tpot=0.1".

    Raises:
        OptionError: another name, one given twice, or no time above 0.

    Example:
        >>> parse_levels("ttft=2,tpot=0.1")
        {'ttft': 2.0, 'tpot': 0.1}
    """
    levels: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if name not in LEVELS or name in levels or not 0 < seconds < float("inf"):
            raise OptionError(f"service level {part.strip()!r} must read ttft=2, tpot=0.1 or e2e=30, in seconds, once")
        levels[name] = seconds
    return levels


def summarise(outcomes: Sequence[RequestOutcome], levels: Mapping[str, float]) -> dict[str, Any]:
    """Counts, rates and times, over the seconds from the first sending to the last end.

    A failed request is in no time and no token count, and misses every service level. An answer of one token has no
    time per token and misses none. Goodput is the rate of requests that meet all levels at once.
    """
    answered = [outcome for outcome in outcomes if outcome.failure is None]
    seconds = max(o.ended_s for o in outcomes) - min(o.sent_s for o in outcomes) if outcomes else 0.0
    met = {name: [_meets(outcome, name, limit) for outcome in outcomes] for name, limit in levels.items()}
    joint = [outcome.failure is None and all(of[i] for of in met.values()) for i, outcome in enumerate(outcomes)]
    read, written = sum(o.prompt_tokens for o in answered), sum(o.output_tokens for o in answered)

    def rate(n: int) -> float:
        return n / seconds if seconds else 0.0

    return {
        "sent": len(outcomes),
        "answered": len(answered),
        "failed": len(outcomes) - len(answered),
        "failures": dict(Counter(o.failure for o in outcomes if o.failure is not None)),
        "seconds": seconds,
        "prompt_tokens": read,
        "output_tokens": written,
        "requests_per_s": rate(len(answered)),
        "output_tokens_per_s": rate(written),
        "total_tokens_per_s": rate(read + written),
        "ttft_s": spread([o.ttft_s for o in answered]),
        "tpot_s": spread([o.tpot_s for o in answered]),
        "e2e_s": spread([o.e2e_s for o in answered]),
        "late_s": spread([o.sent_s - o.planned_s for o in outcomes]),
        "levels_s": dict(levels),
        "attained": {name: _share(of) for name, of in met.items()},
        "attained_jointly": _share(joint),
        "goodput_per_s": rate(sum(joint)),
    }


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean, percentiles and the largest, of those that there are; None of none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    percentiles = np.percentile(known, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(np.mean(known)), **named, "max": max(known)}


def _meets(outcome: RequestOutcome, name: str, limit: float) -> bool:
    time = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2e": outcome.e2e_s}[name]
    return outcome.failure is None and (time is None or time <= limit)


def _share(met: Sequence[bool]) -> float:
    return sum(met) / len(met) if met else 0.0
