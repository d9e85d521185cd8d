"""Orders that papers of 2025 and 2026 state among methods, and whether the board's rows show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millpond_lab.evals.harness.summary import Difference
from millpond_lab.evals.report.board import FULL, RESAMPLES, SEED, SOLVED, BoardRow, Setting
from millpond_lab.evals.report.leaderboard import markdown_table

#: Scripts that try an order on the models that a paper has: RULER's tasks, and a benchmark of LongBench's form.
_RULER = "published_rows.py --rows {}"
_LONGBENCH = (
    "millpond eval --model meta-llama/Llama-3.1-8B-Instruct --tasks longbench:path=FILE --budget {} --method {}"
)
_REASONING = "millpond eval --model Qwen/Qwen3-4B --tasks gsm8k:path=FILE --protocol aware --budget 1024 --method {}"


@dataclass(frozen=True, slots=True)
class Order:
    """Two methods, the better one first.

    Attributes:
        better, worse: as `--method` names them. source: who says so. figures: in which measure, by what figures.
        command: which tries it on the paper's own model.
        tried: Whether the tasks of the board are of the kind that the paper speaks of.
    """

    better: str
    worse: str
    source: str
    figures: str
    command: str
    tried: bool = True


_DEFENSIVE, _LAVA = "DefensiveKV, arXiv:2510.13334", "LAVa, arXiv:2509.09754"
_RANDOM = "Random Attention, arXiv:2609.03430"
ORDERS = (
    Order(
        "defensivekv", "snapkv", _DEFENSIVE, "RULER 4k, 20 % of the cache: 85.3 and 39.0", _RULER.format("defensivekv")
    ),
    Order("defensivekv", "ada", _DEFENSIVE, "the same: 85.3 and 46.0", _RULER.format("defensivekv")),
    Order(
        "defensivekv:across=true",
        "defensivekv",
        _DEFENSIVE,
        "the same: 91.4 and 85.3",
        _RULER.format("defensivekv,defensivekv-layer"),
    ),
    Order(
        "defensivekv",
        "criticalkv",
        _DEFENSIVE,
        "loss on LongBench at 20 %: 4.6 and 9.6 %",
        _LONGBENCH.format("20%", "defensivekv,criticalkv"),
    ),
    Order(
        "criticalkv",
        "cake",
        _DEFENSIVE,
        "loss on LongBench at 20 %: 9.6 and 16.2 %",
        _LONGBENCH.format("20%", "criticalkv,cake"),
    ),
    Order(
        "cake",
        "snapkv",
        _DEFENSIVE,
        "loss on LongBench at 20 %: 16.2 and 20.1 %",
        _LONGBENCH.format("20%", "cake,snapkv"),
    ),
    Order("lava", "ada", _LAVA, "LongBench at 128 entries: 36.74 and 35.82", _LONGBENCH.format("128", "lava,ada")),
    Order("lava", "cake", _LAVA, "LongBench at 128 entries: 36.74 and 35.06", _LONGBENCH.format("128", "lava,cake")),
    Order(
        "vase",
        "snapkv:decode=evict",
        "VaSE, arXiv:2606.03928",
        "MATH-500 at 1,024 entries: 81.8 and 72.3 (attention alone)",
        _REASONING.format("vase,snapkv:decode=evict"),
        tried=False,
    ),
    Order(
        "random_attention",
        "vase",
        _RANDOM,
        "MATH-500 at 1,024 entries: .874 and .809",
        _REASONING.format("random_attention,vase"),
        tried=False,
    ),
    Order(
        "triattention",
        "rkv",
        "TriAttention, arXiv:2604.04921",
        "AIME24 at 2,048 entries: 42.1 and 25.4",
        _REASONING.format("triattention,rkv"),
        tried=False,
    ),
)


def order_difference(better: BoardRow, worse: BoardRow) -> Difference:
    """The mean score of one row less that of another, over the contexts of both, and its 95 % interval."""
    n = min(len(better["scores"]), len(worse["scores"]))
    apart = np.array(better["scores"][:n]) - np.array(worse["scores"][:n])
    means = apart[np.random.default_rng(SEED).integers(n, size=(RESAMPLES, n))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Difference(float(apart.mean()), float(low), float(high), n)


def orders_table(report: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """A row for each order, model, task and budget with rows of both methods; one for each order without any.

    Args:
        report: The rows of `benchmarks/quality/board.py`.
        names: of the models, as the table shows them.
    """
    lines = []
    for order in ORDERS:
        said = (f"`{order.better}` over `{order.worse}`", f"{order.source}: {order.figures}")
        found = list(_tried(order, report, names)) if order.tried else []
        lines += [(*said, *cells) for cells in found]
        if not found:
            why = "not run yet" if order.tried else "not testable on these models"
            lines.append((*said, "", "", f"{why}: `{order.command}`"))
    return markdown_table(("order", "who says so", "here", "difference", "verdict"), lines)


def _tried(order: Order, report: Mapping[str, Any], names: Mapping[str, str]) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    for name, shown in names.items():
        rows = {(row["family"], Setting(*row["setting"])): row for row in report["models"][name]["rows"]}
        for (family, setting), better in rows.items():
            worse = rows.get((family, setting._replace(method=order.worse)))
            full = rows.get((family, FULL))
            if setting.method != order.better or worse is None or full is None or np.mean(full["scores"]) < SOLVED:
                continue
            apart = order_difference(better, worse)
            where = f"{shown}, {family}, {' '.join(part for part in setting[1:] if part != 'auto')}"
            number = f"{apart.mean:+.2f} ({apart.low:+.2f} to {apart.high:+.2f}, {apart.n} contexts)"
            neither = not any(better["scores"][: apart.n]) and not any(worse["scores"][: apart.n])
            verdict = f"not testable here, neither keeps an answer: `{order.command}`" if neither else apart.verdict
            found.append((where, number, verdict))
    return found
