"""An independent simulation of merging: plain loops over entries in float64, attention with log m in plain sums.

Written without any part of the package. The model attends through `Merging`, which keeps its own lists of entries; a
rule is a function from the entries of one head to those that stay, with what they took in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tests.helpers.matrix.oracle import Oracle, Rule


@dataclass(frozen=True)
class Entry:
    """What one slot holds."""

    pos: int
    k: Tensor
    v: Tensor
    m: float = 1.0
    s: float = 0.0


@dataclass
class Plain:
    """How many entries stay and which, and what becomes of the others, in plain words.

    `choose`: heavy | newest | pivots | local. `act` merges what leaves. `every`: steps that gather; `window`: queries.
    """

    choose: str
    act: Callable[[Plain, list[Entry], list[Entry], Head], list[Entry]]
    budget: int
    sinks: int = 0
    recent: float = 0.0
    every: int = 1
    window: int = 0
    bias: bool = False
    grows: bool = False
    by_density: bool = False
    settings: dict[str, float] = field(default_factory=dict)


@dataclass
class Head:
    """One KV head of one sequence."""

    entries: list[Entry] = field(default_factory=list)
    queries: list[tuple[int, Tensor]] = field(default_factory=list)
    run: dict[int, int] = field(default_factory=dict)  # of a position, within one plan
    value: dict[int, float] = field(default_factory=dict)  # of a position, within one plan
    tau: float = 0.0


class Merging(Oracle):
    """An oracle that merges."""

    def __init__(self, plain: Plain) -> None:
        super().__init__(Rule("newest", 0))
        self.plain = plain
        self.state: dict[tuple[int, int], list[Head]] = {}
        self.due: set[tuple[int, int]] = set()
        self.budgets: dict[tuple[int, int], int] = {}
        self.taus: dict[tuple[int, int], float] = {}

    def kept(self, layer: int, b: int) -> list[list[int]]:
        return [sorted(e.pos for e in head.entries) for head in self.state[layer, b]]

    def _sequence(self, layer: int, b: int, q: Tensor, k: Tensor, v: Tensor, n_past: int, scale: float) -> Tensor:
        group, is_step, n = q.shape[0] // k.shape[0], n_past > 0 and q.shape[1] == 1, k.shape[1]
        if (layer, b) not in self.state:
            self.state[layer, b] = [Head() for _ in range(len(k))]
        if is_step and (layer, b) in self.due:
            self._settle(layer, b, n_past)
        heads, out = self.state[layer, b], torch.zeros_like(q)
        for h, head in enumerate(heads):
            own = slice(h * group, (h + 1) * group)
            for i in range(q.shape[1]):
                t = n_past + i
                head.entries.append(Entry(t, k[h, t], v[h, t]))
                p = self._attention(q[own, i], head.entries, scale)
                out[own, i] = sum(p[:, [j]] * e.v for j, e in enumerate(head.entries))  # type: ignore[assignment]
                weight = p.mean(0).tolist()
                head.entries = [replace(e, s=e.s + w) for e, w in zip(head.entries, weight, strict=True)]
                head.queries = [*head.queries, (t, q[own, i])][-max(self.plain.window, 1) :]
        budget = self.budgets.get((layer, b), self.plain.budget)
        if is_step:
            if not self.plain.grows and any(len(head.entries) - budget >= self.plain.every for head in heads):
                self._plan((layer, b), budget, n, scale)
        elif self.plain.by_density:
            self.due.add((layer, b))
        else:
            self._plan((layer, b), budget, n, scale)
        return out

    def _attention(self, q: Tensor, entries: list[Entry], scale: float) -> Tensor:
        """q (group, D) -> (group, entries)."""
        bias = [math.log(e.m) if self.plain.bias else 0.0 for e in entries]
        logits = torch.stack([(q * e.k).sum(1) * scale + x for e, x in zip(entries, bias, strict=True)], 1)
        return logits.softmax(1)

    def _settle(self, layer: int, b: int, n: int) -> None:
        """Layer budgets from the spread of attention, when the first layer plans; then the plan of one layer."""
        self.due.discard((layer, b))
        if layer == 0:
            layers = sorted(at for at, of in self.state if of == b)
            spreads = []
            for at in layers:
                rows = [torch.tensor([e.s for e in head.entries], dtype=torch.float64) for head in self.state[at, b]]
                spreads.append(sum(float(row.var()) for row in rows) / len(rows))
            weights = [math.exp(-x / max(spreads)) for x in spreads]
            total = self.plain.budget * len(layers)
            free = [total * w / sum(weights) - self.plain.sinks for w in weights]
            exact = [self.plain.sinks + x for x in free]
            floors = [math.floor(x) for x in exact]
            order = sorted(layers, key=lambda at: (floors[at] - exact[at], at))
            for at in order[: total - sum(floors)]:
                floors[at] += 1
            for at in layers:
                self.budgets[at, b] = min(floors[at], n)
        self._plan((layer, b), self.budgets[layer, b], n, 0.0)

    def _plan(self, at: tuple[int, int], budget: int, n: int, scale: float) -> None:
        rule, heads = replace(self.plain, budget=budget), self.state[at]
        split = [self._chosen(rule, head, n, scale) for head in heads]
        if "rate" in rule.settings:
            self._threshold(at, split, rule.settings["rate"])
        for head, (kept, gone) in zip(heads, split, strict=True):
            head.tau = self.taus.get(at, 0.0)
            stay = rule.act(rule, kept, gone, head) if gone else kept
            head.entries = stay if rule.bias else [replace(e, m=1.0) for e in stay]

    def _threshold(self, at: tuple[int, int], split: list[tuple[list[Entry], list[Entry]]], rate: float) -> None:
        found = [max(cosine(e.k, c.k) for c in kept if c.pos >= self.plain.sinks) for kept, gone in split for e in gone]
        if found:
            now = sum(found) / len(found)
            self.taus[at] = rate * now + (1 - rate) * self.taus[at] if at in self.taus else now

    def _chosen(self, rule: Plain, head: Head, n: int, scale: float) -> tuple[list[Entry], list[Entry]]:
        entries = sorted(head.entries, key=lambda e: e.pos)
        safe = {e.pos for e in entries if e.pos < rule.sinks or e.pos >= n - int(rule.recent * rule.budget)}
        if rule.window:
            safe |= {e.pos for e in entries if e.pos >= n - rule.window}
            self._local(rule, head, entries, scale)
        value = {e.pos: float(e.pos) if rule.choose == "newest" else e.s for e in entries}
        if rule.choose == "local":
            value = head.value
        if rule.choose == "pivots":
            runs = make_runs(rule, entries, safe)
            pivots = {max(run, key=lambda e: (e.s, e.pos)).pos for run in runs}
            value = {e.pos: e.s if e.pos in pivots else e.s - 1e6 for e in entries}
            head.run = {e.pos: i for i, run in enumerate(runs) for e in run}
            if "eps" in rule.settings:
                rule = replace(rule, budget=min(rule.budget, len(pivots)))
        order = sorted(entries, key=lambda e: (e.pos not in safe, -value[e.pos], -e.pos))
        chosen = {e.pos for e in order[: rule.budget]}
        return [e for e in entries if e.pos in chosen], [e for e in entries if e.pos not in chosen]

    def _local(self, rule: Plain, head: Head, entries: list[Entry], scale: float) -> None:
        local = dict.fromkeys((e.pos for e in entries), 0.0)
        for t, q in head.queries:
            seen = [e for e in entries if e.pos <= t]
            for e, w in zip(seen, self._attention(q, seen, scale).mean(0).tolist(), strict=True):
                local[e.pos] += w
        factor = sum(e.s for e in entries) / sum(local.values())
        head.value = {e.pos: max(e.s, local[e.pos] * factor) for e in entries}


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def mix(entries: list[Entry], weights: list[float], pivot: Entry, keys: bool = True) -> Entry:
    """The weighted mean, at the place of the pivot and with the mass of all."""
    total = sum(weights)
    k = sum((w / total * e.k for e, w in zip(entries, weights, strict=True)), torch.zeros_like(pivot.k))
    v = sum((w / total * e.v for e, w in zip(entries, weights, strict=True)), torch.zeros_like(pivot.v))
    return replace(pivot, k=k if keys else pivot.k, v=v, m=sum(e.m for e in entries))


def classes(
    kept: list[Entry], gone: list[Entry], like: Callable[[Entry, Entry], float], sinks: int
) -> dict[int, list[tuple[Entry, float]]]:
    """By position of the kept entry: those that are most like it, and how much."""
    found: dict[int, list[tuple[Entry, float]]] = {c.pos: [] for c in kept}
    for e in gone:
        open_ = [c for c in kept if c.pos >= sinks]
        if open_:
            best = max(open_, key=lambda c: (like(e, c), -c.pos))
            found[best.pos].append((e, like(e, best)))
    return found


def into_nearest(rule: Plain, kept: list[Entry], gone: list[Entry], head: Head) -> list[Entry]:
    out = []
    members = classes(kept, gone, lambda e, c: cosine(e.k, c.k), rule.sinks)
    for c in kept:
        taken = [(e, u) for e, u in members[c.pos] if u >= rule.settings["threshold"]]
        norms = [float(e.v.norm()) for e, _ in taken]
        weights = [e.m * u * x / (x + float(c.v.norm())) for (e, u), x in zip(taken, norms, strict=True)]
        out.append(mix([c, *(e for e, _ in taken)], [c.m, *weights], c, keys=False) if taken else c)
    return out


def recall(rule: Plain, kept: list[Entry], gone: list[Entry], head: Head) -> list[Entry]:
    out = []
    members = classes(kept, gone, lambda e, c: cosine(e.k, c.k), rule.sinks)
    for c in kept:
        taken = [(e, u) for e, u in members[c.pos] if u >= head.tau - 1e-6]
        weights = [e.m * math.exp(u) for e, u in taken]
        out.append(mix([c, *(e for e, _ in taken)], [c.m * math.e, *weights], c) if taken else c)
    return out


def make_runs(rule: Plain, entries: list[Entry], safe: set[int]) -> list[list[Entry]]:
    heavy = sorted((e for e in entries if e.pos not in safe), key=lambda e: (-e.s, -e.pos))
    alone = safe | {e.pos for e in heavy[: math.floor(rule.settings["top"] * rule.budget)]}
    pairs = [
        (cosine(entries[j].k, entries[j - 1].k), j)
        for j in range(1, len(entries))
        if entries[j].pos not in alone and entries[j - 1].pos not in alone
    ]
    if "eps" in rule.settings:
        joins = {j for u, j in pairs if u > rule.settings["eps"]}
    else:
        joins = {j for _, j in sorted(pairs, reverse=True)[: max(0, len(entries) - rule.budget)]}
    runs: list[list[Entry]] = []
    for j, e in enumerate(entries):
        if j in joins:
            runs[-1].append(e)
        else:
            runs.append([e])
    return runs


def into_pivots(rule: Plain, kept: list[Entry], gone: list[Entry], head: Head) -> list[Entry]:
    out = []
    for c in kept:
        members = [e for e in gone if head.run[e.pos] == head.run[c.pos]]
        weights = [e.m * math.exp(-float((c.k - e.k).square().sum()) / (2 * 5.0**2)) for e in members]
        merged = mix([c, *members], [c.m, *weights], c) if members else c
        out.append(replace(merged, s=c.s + sum(e.s for e in members)))
    return out


def into_next(rule: Plain, kept: list[Entry], gone: list[Entry], head: Head) -> list[Entry]:
    everyone = sorted([*kept, *gone], key=lambda e: e.pos)
    value = {c.pos: c.m * c.v for c in everyone}
    mass = {c.pos: c.m for c in everyone}
    for e in sorted(gone, key=lambda e: e.pos):
        behind = [c for c in everyone if c.pos > e.pos][: int(rule.settings["targets"])]
        p = min(1.0, e.s / (sum(c.s for c in behind) / len(behind)))
        for c in behind:
            value[c.pos] = value[c.pos] + p * value[e.pos] / len(behind)
            mass[c.pos] += p * mass[e.pos] / len(behind)
    return [
        replace(c, v=value[c.pos] / mass[c.pos], m=mass[c.pos]) if rule.bias else replace(c, v=value[c.pos])
        for c in kept
    ]


def into_classes(rule: Plain, kept: list[Entry], gone: list[Entry], head: Head) -> list[Entry]:
    value = head.value
    total, covered, relevant = sum(value.values()), 0.0, 0
    for x in sorted(value.values(), reverse=True):
        relevant += covered < rule.settings["cover"] * total
        covered += x
    middle = sorted(gone, key=lambda e: (-value[e.pos], -e.pos))
    middle = middle[: min(max(0, relevant - len(kept)), int(rule.settings["most"] * len(kept)))]

    def like(e: Entry, c: Entry) -> float:
        x, y = cosine(e.k, c.k), cosine(e.v, c.v)
        return x * y if x > 0 and y > 0 else -1.0

    out, members = [], classes(kept, middle, like, rule.sinks)
    for c in kept:
        taken = [c, *(e for e, u in members[c.pos] if u > rule.settings["threshold"])]
        if len(taken) == 1:
            out.append(c)
            continue
        w = torch.tensor([value[e.pos] for e in taken], dtype=torch.float64)
        w /= w.sum()
        direction = sum((x * e.k / e.k.norm() for x, e in zip(w, taken, strict=True)), torch.zeros_like(c.k))
        length = sum(float(x * e.k.norm()) for x, e in zip(w, taken, strict=True))
        merged = mix(taken, w.tolist(), c)
        out.append(replace(merged, k=direction / direction.norm() * length, s=sum(e.s for e in taken)))
    return out
