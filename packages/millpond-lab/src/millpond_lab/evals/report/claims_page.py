"""The tables of the page about orderings, from findings. Pure, so that a check can compare the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from millpond.budget import Budget
from millpond_lab.evals.harness.summary import Verdict
from millpond_lab.evals.report.claims import ALL, AT_BYTES, CLAIMS, PEERS, SAME_BYTES, Claim, ClaimResult
from millpond_lab.evals.report.kvpress_equivalents import pool
from millpond_lab.evals.report.leaderboard import MASKED, markdown_table, span

MISSING = "No results yet: `benchmarks/quality/quality.sh curves curve-peers needles text-pairs orderings` makes them."
#: The verdicts in the words that fit a comparison with a peer.
AGAINST_PEERS: dict[Verdict, str] = {"holds": "ahead", "no difference seen": "no difference seen", "reversed": "below"}
SUMMARY = "summary"
#: The place of pairs that were to hold as many bytes and do not.
UNEQUAL = f"{AT_BYTES}-unequal"

T = TypeVar("T")


def tables(findings: Sequence[ClaimResult]) -> dict[str, str]:
    """The generated parts of the page by the names of their places."""
    by_claim = {claim.name: [f for f in findings if f.claim == claim.name] for claim in CLAIMS}
    parts = {claim.name: _claim(claim, by_claim[claim.name]) for claim in CLAIMS}
    equal, unequal = _by_bytes([finding for finding in findings if finding.claim == AT_BYTES])
    peers = {PEERS: _peers([finding for finding in findings if finding.claim == PEERS])}
    peers |= {AT_BYTES: _peers(equal), UNEQUAL: _peers(unequal)}
    return {SUMMARY: _summary(findings), **parts, **peers}


def _summary(findings: Sequence[ClaimResult]) -> str:
    whole = [f for f in findings if f.budget == ALL]
    if not whole:
        return MISSING
    protocols = _once(f.protocol for f in whole)
    body = []
    for claim in CLAIMS:
        own = [f for f in whole if f.claim == claim.name]
        for first, second in _once((f.first, f.second) for f in own):
            by_protocol = {f.protocol: _verdict(f) for f in own if (f.first, f.second) == (first, second)}
            verdicts = [by_protocol.get(protocol, "–") for protocol in protocols]
            body.append([claim.title, claim.source, f"{_name(first)} over {_name(second)}", *verdicts])
    text = markdown_table(["claim", "by", "measured as", *protocols], body)
    entries = [f for f in whole if f.claim == PEERS]
    equal, unequal = _by_bytes([f for f in whole if f.claim == AT_BYTES])
    return text + "".join(
        [
            _count("with as many entries", entries),
            _count(f"with as many bytes (within {100 * SAME_BYTES:g} %)", equal),
            _count(f"with as many entries in whole pages, but {_apart(unequal)}", unequal),
        ]
    )


def _count(how: str, findings: Sequence[ClaimResult]) -> str:
    if not findings:
        return ""
    peers = [finding.difference.verdict for finding in findings]
    counts = ", ".join(f"{words} in {peers.count(verdict)}" for verdict, words in AGAINST_PEERS.items())
    return f"\nAgainst kvpress {how}, {len(peers)} pairs of method and protocol: {counts}."


def _by_bytes(findings: Sequence[ClaimResult]) -> tuple[list[ClaimResult], list[ClaimResult]]:
    """Those whose sides hold as many bytes over all budgets, and the others."""
    equal = {_pair(f) for f in findings if f.budget == ALL and f.at_equal_bytes}
    return [f for f in findings if _pair(f) in equal], [f for f in findings if _pair(f) not in equal]


def _apart(findings: Sequence[ClaimResult]) -> str:
    """How the bytes of two sides differ: "6 to 8 % more in ours, or all of them in a press that masks"."""
    more = sorted(round(100 * f.more_held) for f in findings if not f.masks_only)
    parts = [f"{' to '.join(map(str, dict.fromkeys((more[0], more[-1]))))} % more bytes in ours"] if more else []
    if any(f.masks_only for f in findings):
        parts.append("all bytes held by a press that masks")
    return " or ".join(parts)


def _claim(claim: Claim, findings: Sequence[ClaimResult]) -> str:
    if not findings:
        return MISSING
    budgets = _budgets(findings)
    heads = ["pair", "protocol", *map(_head, budgets), "verdict"]
    body = [
        [f"{_name(own[0].first)} over {_name(own[0].second)}", *_line(own, budgets, _verdict)]
        for own in _lines(findings)
    ]
    notes = [f"`{name}` also {what}." for name, what in claim.beside]
    return "\n".join([markdown_table(heads, body), " ".join([_tasks(findings), *notes])])


def _peers(findings: Sequence[ClaimResult]) -> str:
    if not findings:
        return MISSING
    budgets = _budgets(findings)
    held = ["bytes of full, ours", "theirs", "more in ours"]
    heads = ["ours", "theirs", "protocol", *map(_head, budgets), "ours is", *held]
    body = [
        [
            _name(own[0].first),
            _name(own[0].second, own[0].peer) + (f" {MASKED}" if own[0].masks_only else ""),
            *_line(own, budgets, lambda f: AGAINST_PEERS[f.difference.verdict]),
            f"{_whole(own).held:.1%}",
            f"{_whole(own).other_held:.1%}",
            f"{_whole(own).more_held:+.1%}",
        ]
        for own in _lines(findings)
    ]
    who = ", ".join(_once(f.peer for f in findings))
    masked = any(f.masks_only for f in findings)
    note = f" {MASKED} hides as many entries as we free, and keeps them in memory." if masked else ""
    return "\n".join([markdown_table(heads, body), f"{who}. {_tasks(findings)}{note}"])


def _name(method: str, peer: str = "millpond") -> str:
    """A candidate, and the pool of its attention where it has one."""
    pooled = pool(method, peer)
    return f"`{method}`" + (f" ({pooled})" if pooled else "")


def _line(own: Sequence[ClaimResult], budgets: Sequence[str], verdict: Callable[[ClaimResult], str]) -> list[str]:
    """Protocol, differences over the budgets, and what the mean over budgets says."""
    by_budget = {finding.budget: finding for finding in own}
    return [
        own[0].protocol,
        *(_difference(by_budget[b]) if b in by_budget else "–" for b in budgets),
        verdict(_whole(own)),
    ]


def _difference(finding: ClaimResult) -> str:
    """In points of a score from 0 to 100, or hundredths of a nat; bold where zero is outside the interval."""
    mean, low, high = (f"{100 * value:+.1f}" for value in (finding.mean, finding.low, finding.high))
    shown = mean if finding.difference.verdict == "no difference seen" else f"**{mean}**"
    return f"{shown} ({low} to {high})"


def _verdict(finding: ClaimResult) -> Verdict:
    return finding.difference.verdict


def _whole(own: Sequence[ClaimResult]) -> ClaimResult:
    return next(finding for finding in own if finding.budget == ALL)


def _lines(findings: Sequence[ClaimResult]) -> list[list[ClaimResult]]:
    """Findings of one pair and protocol each, in the order in which pairs came."""
    keys = _once(map(_pair, findings))
    return [[finding for finding in findings if _pair(finding) == key] for key in keys]


def _pair(finding: ClaimResult) -> tuple[str, str, str, str]:
    return finding.first, finding.second, finding.peer, finding.protocol


def _budgets(findings: Sequence[ClaimResult]) -> list[str]:
    """Smallest first; the mean over them last."""
    named = _once(f.budget for f in findings if f.budget != ALL)
    return [*sorted(named, key=lambda text: Budget.parse(text).amount), ALL]


def _head(budget: str) -> str:
    return "all budgets" if budget == ALL else budget


def _tasks(findings: Sequence[ClaimResult]) -> str:
    tasks = ", ".join(f"`{task.replace(':', ' ')}`" for task in _once(t for f in findings for t in f.tasks))
    return f"{span(finding.n for finding in findings)} samples of {tasks}."


def _once(items: Iterable[T]) -> list[T]:
    """Each once, in the order in which they first came."""
    return list(dict.fromkeys(items))
