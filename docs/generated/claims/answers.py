"""Claims tried by questions about texts that were evicted from, each beside the full cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from generated.claims.form import ALL, CONTRADICTED, PARTLY, REPRODUCED, UNSEEN, Claim, Tried, found_share, of_all
from generated.results import read

Rows = dict[tuple[str, str, str], dict[str, Any]]


def _rows(name: str) -> Rows:
    """By method, budget and format."""
    return {(row["method"], row["budget"], row["codec"]): row for row in read(name)}


def _order(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Of two shares of the same questions; intervals that overlap show no difference."""
    if own["score"]["low"] > other["score"]["high"]:
        return REPRODUCED
    return CONTRADICTED if own["score"]["high"] < other["score"]["low"] else UNSEEN


# ---------------------------------------------------------------------- the question known

BUDGETS = ("3%", "6%", "20%")


def _known(method: str, others: Sequence[str], judge: Callable[[Rows], str]) -> Tried:
    rows = _rows("known-facts")
    full = rows["full", "", "auto"]
    each = "; ".join(
        f"{budget}: " + ", ".join(f"`{one}` {found_share(rows[one, budget, 'auto'])}" for one in (method, *others))
        for budget in BUDGETS
    )
    return Tried(
        f"facts found, the full cache {found_share(full)}; {each}",
        ", ".join(f"{rows[method, budget, 'auto']['bytes']:.0%}" for budget in BUDGETS),
        f"SmolLM2-135M, {full['questions']} texts of 2,048 with three facts, the question known",
        "known-facts.json",
        "benchmarks/quality/paper_rows.sh",
        judge(rows),
    )


def _each_budget(rows: Rows, method: str, others: Sequence[str]) -> str:
    return of_all(
        [_order(rows[method, budget, "auto"], rows[one, budget, "auto"]) for budget in BUDGETS for one in others]
    )


def ada() -> Tried:
    """Heads that compete, beside equal ones of the same score."""
    return _known("ada", ("snapkv",), lambda rows: _each_budget(rows, "ada", ("snapkv",)))


def pyramid() -> Tried:
    """More entries in the lower layers, beside as many in each."""
    return _known("pyramidkv", ("snapkv",), lambda rows: _each_budget(rows, "pyramidkv", ("snapkv",)))


def ems() -> Tried:
    """Evicting and merging at the smallest budgets."""
    others = ("snapkv", "h2o")

    def judge(rows: Rows) -> str:
        most = ALL * rows["full", "", "auto"]["score"]["mean"]
        if rows["ems", BUDGETS[0], "auto"]["score"]["mean"] >= most:
            return REPRODUCED
        found = _each_budget(rows, "ems", others)
        return PARTLY if found == REPRODUCED else found

    return _known("ems", others, judge)


# ---------------------------------------------------------------------- few bits in place of evicting

FORMATS, EVICTED = ("int8_mikv", "int8_mikv3", "int8_mikv4"), ("20%", "29%", "36%")


def few_bits(name: str, model: str, asked: str) -> Callable[[], Tried]:
    """What a text's beginning said, where the rest is evicted, or stored in few bits."""

    def tried() -> Tried:
        rows = _rows(name)
        full = rows["full", "", "auto"]
        evicted = [rows["h2o", budget, "auto"] for budget in EVICTED]
        kept = [rows["h2o", EVICTED[0], codec] for codec in FORMATS]
        each = [f"evicted to {budget} {found_share(row)}" for budget, row in zip(EVICTED, evicted, strict=True)]
        each += [f"`{codec}` {found_share(row)}" for codec, row in zip(FORMATS, kept, strict=True)]
        # the evicting rows that hold no fewer bytes
        pairs = [(own, [row for row in evicted if row["bytes"] >= own["bytes"] - 0.01]) for own in kept]
        return Tried(
            f"{asked}, the full cache {found_share(full)}; with `h2o` {', '.join(each)}",
            ", ".join(f"{row['bytes']:.0%}" for row in (*evicted, *kept)),
            f"{model}, {full['questions']} questions on {full['contexts']} texts of 1,024",
            f"{name}.json",
            "benchmarks/quality/paper_rows.sh",
            of_all([_order(own, other) for own, others in pairs for other in others]),
        )

    return tried


CLAIMS = (
    Claim("Ada-KV", "competing heads find more than equal ones of SnapKV", ada),
    Claim("Ada-KV", "PyramidKV, which it stands on too, finds more than SnapKV", pyramid),
    Claim("EMS", "finds 95 % of what the full cache finds with less than 2 % of it", ems),
    Claim(
        "MiKV",
        "what was said at the beginning is lost by evicting, and kept in few bits",
        few_bits("early", "SmolLM2-135M", "facts of the first twentieth"),
    ),
    Claim(
        "MiKV",
        "instructions are forgotten by evicting, and obeyed in few bits",
        few_bits("obeyed", "Qwen2.5-Coder-0.5B", "rules of a system message obeyed"),
    ),
)
