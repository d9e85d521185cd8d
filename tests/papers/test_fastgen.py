"""FastGen: recoveries, the choice of rules, and what each head holds at every step, worked without the package."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.state.token_ids import TokenIds
from millpond.errors import OptionError
from millpond.kernels.args import AttentionShape
from millpond.kernels.decode_rules import UNBOUNDED
from millpond.methods import METHODS
from millpond.policy.head_rules import HeadRulesPolicy, shorten
from millpond.policy.needs import HeadRule, Heads
from millpond.policy.view import View
from tests.helpers.examples import examples
from tests.helpers.papers.fixture import LOGITS, ROWS, N, feed, kept, make_layer_cache

PART = {"special": "90;91", "punctuation": "80;81;82"}


def policy(**options: Any) -> HeadRulesPolicy:
    built = METHODS.get("fastgen")(**{**PART, **options})
    assert isinstance(built, HeadRulesPolicy)
    return built


def opened(chosen: HeadRulesPolicy, budget: int, ids: Tensor) -> LayerCache:
    cache = make_layer_cache(chosen, budget)
    cache.tracker.tokens = TokenIds()
    cache.tracker.begin_pass(ids)
    return cache


def recovered(p: Tensor, chosen: HeadRulesPolicy, classes: list[int]) -> list[list[float]]:
    """Of causal attention p (group, n, n) of one KV head: the recovery of each query head and kind."""
    n = p.shape[-1]
    positions = torch.arange(n, dtype=torch.int32)[None]
    distance = torch.arange(n)[:, None] - torch.arange(n)

    def look(begin: int, end: int) -> Tensor:
        return p.masked_fill((distance < begin) | (distance >= (end or n)), 0).sum(1)[None]

    value = p.sum(1).mean(0)[None].float()
    local = math.ceil(round(chosen.local * n, 9))
    heads = Heads(
        value[None],
        positions[None],
        torch.tensor([[classes]], dtype=torch.int8),
        torch.zeros(1, 1).int(),
        *(torch.tensor([x]) for x in (n, local, UNBOUNDED)),
    )
    view = View(positions, value, n, 0, head_attention=look)
    return chosen.recovery(view, chosen.by_kind(heads), local)[0].tolist()  # type: ignore[no-any-return]


# ------------------------------------------------------------------ fixture F6


def test_recoveries_of_the_fixture() -> None:
    p = torch.tensor([[*row, *[0.0] * (N - len(row))] for row in ROWS], dtype=torch.float64)[None]
    (found,) = recovered(p, policy(), [2, 0, 0, 1, 0, 0])
    assert found == pytest.approx([0.472058, 0.591878, 0.924306, 1.0, 1.0], abs=2e-6)


@pytest.mark.parametrize(
    ("threshold", "kind", "stays"),
    [
        (0.4, HeadRule.SPECIAL, [0]),
        (0.5, HeadRule.PUNCTUATION, [0, 3]),
        (0.9, HeadRule.FREQUENT, [0, 1, 2, 3]),
        (0.95, HeadRule.LOCAL, [0, 1, 2, 3, 4, 5]),
        (1.0, HeadRule.FULL, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_fixture_through_the_cache(threshold: float, kind: HeadRule, stays: list[int]) -> None:
    cache = opened(policy(threshold=threshold), UNBOUNDED, torch.tensor([[90, 1, 2, 80, 4, 5]]))
    feed(cache, LOGITS[None], 0, N)
    assert cache.table is not None
    assert cache.table.head_rules.tolist() == [kind]
    assert kept(cache) == stays


# ------------------------------------------------------------------ the choice


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 9999), n=st.integers(2, 40), share=st.sampled_from([0.0, 0.1, 0.3, 1.0]))
def test_recovery_rises_along_the_rules_and_ends_at_one(seed: int, n: int, share: float) -> None:
    make = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, n, n, generator=make, dtype=torch.float64)
    p = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf).softmax(-1)
    classes = [2, *torch.randint(0, 3, (n - 1,), generator=make).tolist()]
    for row in recovered(p, policy(frequent=share, local=share), classes):
        assert all(a <= b + 1e-12 for a, b in pairwise(row))
        assert row[-1] == pytest.approx(1)


@pytest.mark.parametrize("seed", range(5))
def test_a_head_that_looks_everywhere_keeps_everything(seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    rand = torch.rand(1, 80, 80, generator=make, dtype=torch.float64).tril()
    ids = torch.randint(0, 80, (1, 80), generator=make)
    cache = opened(policy(threshold=0.95), UNBOUNDED, ids)
    feed(cache, (rand + 1e-9).log(), 0, 80)
    assert kept(cache) == list(range(80))
    assert cache.table is not None
    assert cache.table.head_rules.tolist() == [HeadRule.FULL]


def test_a_group_takes_the_dearest_rule_of_its_query_heads() -> None:
    """One query head looks at the first token alone, the other everywhere."""
    n, ids = 40, torch.randint(0, 80, (1, 40), generator=torch.Generator().manual_seed(0))
    first, everywhere = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    first[:, 0] = 50
    keys = torch.eye(n, dtype=torch.float64)[None]
    for rows, kind in (([first], 0), ([everywhere], 4), ([first, everywhere], 4), ([first, first], 0)):
        cache = opened(policy(threshold=0.95), UNBOUNDED, ids)
        cache.attend(torch.stack(rows)[None], keys[None], keys[None], None, AttentionShape(1.0))
        assert cache.table is not None
        assert cache.table.head_rules.tolist() == [kind]


# ------------------------------------------------------------------ a plain simulation


class Plain:
    """One KV head: what it holds and the attention that each entry has gathered."""

    def __init__(self) -> None:
        self.held: dict[int, float] = {}
        self.kind = 4
        self.local = 0


def keeps(head: Plain, kind: int, ids: list[int], seen: int, ratio: float) -> set[int]:
    """The positions that a head of `kind` keeps of those it holds."""
    special = {j for j in head.held if j == 0 or ids[j] in (90, 91)}
    marks = {j for j in head.held if ids[j] in (80, 81, 82)} if kind > 0 else set()
    near = {j for j in head.held if j >= seen - head.local} if kind > 2 else set()
    if kind == 4:
        return set(head.held)
    rest = sorted(set(head.held) - special - marks - near, key=lambda j: (-head.held[j], -j))
    frequent = rest[: math.ceil(round(ratio * seen, 9))] if kind > 1 else []
    return special | marks | near | set(frequent)


def simulate(
    q: Tensor,
    k: Tensor,
    ids: list[int],
    prompt: int,
    threshold: float,
    ratio: float,
    budget: int | None,
    second: int = 0,
) -> list[list[list[int]]]:
    """Positions held per head, after the prompt, a `second` turn and each step. q (H, group, n, D), k (H, n, D).

    Heads have the rules of the prompt.
    """
    heads = [Plain() for _ in k]
    out = []
    for first, t in passes(prompt, second, q.shape[2]):
        for h, head in enumerate(heads):
            before = set(head.held)
            head.held.update({j: 0.0 for j in range(first, t + 1)})
            maps = []
            for member in q[h]:
                rows = []
                for i in range(first, t + 1):
                    seen_by = [j for j in sorted(before | set(range(first, i + 1)))]
                    p = torch.softmax(k[h][seen_by] @ member[i], 0).tolist()
                    rows.append(dict(zip(seen_by, p, strict=True)))
                    for j, x in rows[-1].items():
                        head.held[j] += x / len(q[h])
                maps.append(rows)
            if t == prompt - 1:
                head.local = math.ceil(round(ratio * prompt, 9))
                head.kind = max(cheapest(head, rows, ids, prompt, threshold, ratio) for rows in maps)
            stays = keeps(head, head.kind, ids, t + 1, ratio)
            head.held = {j: x for j, x in head.held.items() if j in stays}
        if budget is not None:
            cap(heads, budget * len(heads), ids, t + 1)
        out.append([sorted(head.held) for head in heads])
    return out


def passes(prompt: int, second: int, n: int) -> list[tuple[int, int]]:
    """First and last token of each pass of a text of n tokens: a prompt, perhaps a second turn, and single tokens."""
    turns = [(0, prompt - 1), *([(prompt, prompt + second - 1)] if second else [])]
    return [*turns, *((t, t) for t in range(prompt + second, n))]


def cheapest(head: Plain, rows: list[dict[int, float]], ids: list[int], n: int, threshold: float, ratio: float) -> int:
    for kind in range(4):
        kept = keeps(head, kind, ids, n, ratio)
        pairs = [(i, j, x) for i, row in enumerate(rows) for j, x in row.items()]
        share = sum(x for i, j, x in pairs if j in kept or (kind == 3 and i - j < head.local))
        if share / n >= threshold:
            return kind
    return 4


def cap(heads: list[Plain], total: int, ids: list[int], seen: int) -> None:
    """Too many are cut to the highest level that fits; what is left over goes to those that had most, last first."""
    had = [len(head.held) for head in heads]
    level = max(x for x in range(total + 1) if sum(min(n, x) for n in had) <= total)
    room = [min(n, level) for n in had]
    longest = sorted((h for h in range(len(had)) if had[h] > level), key=lambda h: (-had[h], -h))
    for h in longest[: total - sum(room)]:
        room[h] += 1
    for head, n in zip(heads, room, strict=True):
        special = {j for j in head.held if j == 0 or ids[j] in (90, 91)}
        marks = {j for j in head.held if ids[j] in (80, 81, 82)} if head.kind > 0 else set()
        newest = {j for j in head.held if j >= seen - min(n // 2, head.local)} if head.kind > 2 else set()

        def worth(j: int, s: set[int] = special, m: set[int] = marks | newest, h: Plain = head) -> Any:
            return (j == 0, j in s, j in s or j in m, h.held[j], j)

        best = sorted(head.held, key=worth, reverse=True)[:n]
        head.held = {j: x for j, x in head.held.items() if j in best}


def drawn(seed: int, n: int = 60) -> tuple[Tensor, Tensor, list[int]]:
    """Six KV heads of two query heads each, of which some look at sinks, at the newest, at few or everywhere."""
    make = torch.Generator().manual_seed(seed)
    q, k = torch.zeros(6, 2, n, 8, dtype=torch.float64), torch.zeros(6, n, 8, dtype=torch.float64)
    q += 0.2 * torch.randn(q.shape, generator=make, dtype=torch.float64)
    k += 0.08 * torch.randn(k.shape, generator=make, dtype=torch.float64)
    ids = torch.randint(0, 80, (n,), generator=make)
    for first, last in ((1, 34), (36, n)):
        places = first + torch.randperm(last - first, generator=make)[:9]
        ids[places] = torch.tensor([90, 91, 80, 81, 82, 80, 81, 82, 90])
    q[..., 0] += 9
    k[0, ids >= 90, 0] += 1
    k[0, 0, 0] += 1  # special tokens
    k[1, ids >= 80, 0] += 1  # and punctuation
    k[1, 0, 0] += 1
    k[4] /= 20  # everywhere
    k[2, torch.randperm(n, generator=make)[:6], 0] += 1  # a few
    k[3, :, 0] += torch.arange(n) / 20  # the newest
    k[5, 0, 0] += 0.4
    return q, k, ids.tolist()


@pytest.mark.covering
@pytest.mark.parametrize("budget", [None, 14, 25])
@pytest.mark.parametrize("seed", range(3))
def test_every_step_is_that_of_a_plain_simulation(seed: int, budget: int | None) -> None:
    q, k, ids = drawn(seed)
    n, prompt = 60, 36
    chosen = policy(threshold=0.9, frequent=0.15, local=0.15)
    expected = simulate(q, k, ids, prompt, 0.9, 0.15, budget)
    cache = opened(chosen, budget or UNBOUNDED, torch.tensor([ids[:prompt]]))
    for t, now in enumerate(expected, prompt - 1):
        first = 0 if t == prompt - 1 else t
        if first:
            cache.tracker.begin_pass(torch.tensor([[ids[t]]]))
        own = q[:, :, first : t + 1].flatten(0, 1)[None]
        cache.attend(own, k[None, :, first : t + 1], k[None, :, first : t + 1], None, AttentionShape(1.0))
        assert [kept(cache, head) for head in range(6)] == now, t
        if budget is not None:
            assert sum(map(len, now)) <= 6 * budget
    assert cache.table is not None
    assert set(cache.table.head_rules.tolist()) == set(range(5))
    cache.table.pool.check_integrity([cache.table.held()])
    pages = sum(-(-len(head) // 8) for head in expected[-1])
    assert cache.table.pool.n_live == pages
    assert len(expected[-1][4]) > len(expected[-1][0])
    assert n == t + 1


@pytest.mark.parametrize("budget", [None, 25])
@pytest.mark.parametrize("seed", range(2))
def test_a_profile_of_once_stays_in_later_turns(seed: int, budget: int | None) -> None:
    """The heads of a second turn act by the rules of the first, step by step as a plain simulation."""
    q, k, ids = drawn(seed)
    prompt, second = 30, 12
    q[:, :, prompt : prompt + second] = 0  # a turn that looks everywhere: measured anew, most heads would keep more
    rules = {}
    for profile in ("once", "turn"):
        cache = opened(
            policy(threshold=0.9, frequent=0.15, local=0.15, profile=profile),
            budget or UNBOUNDED,
            torch.tensor([ids[:prompt]]),
        )
        expected = simulate(q, k, ids, prompt, 0.9, 0.15, budget, second)
        for now, (first, last) in zip(expected, passes(prompt, second, 60), strict=True):
            if first:
                cache.tracker.begin_pass(torch.tensor([ids[first : last + 1]]))
            own = q[:, :, first : last + 1].flatten(0, 1)[None]
            new = k[None, :, first : last + 1]
            cache.attend(own, new, new, None, AttentionShape(1.0))
            if profile == "once":
                assert [kept(cache, head) for head in range(6)] == now, last
        assert cache.table is not None
        rules[profile] = cache.table.head_rules.tolist()
    assert rules["turn"] != rules["once"]
    assert len(set(rules["once"])) > 2


def test_a_special_head_grows_with_special_tokens_alone() -> None:
    q, k, ids = drawn(0)
    cache = opened(policy(threshold=0.0), UNBOUNDED, torch.tensor([ids[:20]]))
    special = {0, *(j for j, x in enumerate(ids) if x >= 90)}
    for t in range(19, 60):
        first = 0 if t == 19 else t
        if first:
            cache.tracker.begin_pass(torch.tensor([[ids[t]]]))
        own = q[:, :, first : t + 1].flatten(0, 1)[None]
        cache.attend(own, k[None, :, first : t + 1], k[None, :, first : t + 1], None, AttentionShape(1.0))
        assert kept(cache) == sorted(j for j in special if j <= t)


def test_a_new_token_sees_itself_before_it_leaves() -> None:
    """A head of special tokens answers the query of a token that it does not admit with that token's value too."""
    k = torch.zeros(1, 1, 4, 2, dtype=torch.float64)
    v = torch.arange(8.0, dtype=torch.float64).view(1, 1, 4, 2)
    cache = opened(policy(threshold=0.0), UNBOUNDED, torch.tensor([[90, 1, 2]]))
    cache.attend(k[:, :, :3], k[:, :, :3], v[:, :, :3], None, AttentionShape(1.0))
    cache.tracker.begin_pass(torch.tensor([[3]]))
    out = cache.attend(k[:, :, 3:], k[:, :, 3:], v[:, :, 3:], None, AttentionShape(1.0))
    assert out[0, 0, 0].tolist() == ((v[0, 0, 0] + v[0, 0, 3]) / 2).tolist()
    assert kept(cache) == [0]


@pytest.mark.parametrize(("counts", "total"), [([3, 9, 9], 12), ([1, 1, 50], 9), ([7, 7, 7], 8), ([2, 2], 9)])
def test_the_longest_are_shortened(counts: list[int], total: int) -> None:
    out = shorten(counts, total)
    assert sum(out) == min(total, sum(counts))
    assert all(0 < a <= b for a, b in zip(out, counts, strict=True))
    cut = [a for a, b in zip(out, counts, strict=True) if a < b]
    assert max(cut, default=0) - min(cut, default=0) <= 1
    assert not cut or max(out) <= max(cut)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.2}, r"threshold=1.2 must be 0 to 1"),
        ({"local": -0.1}, "local=-0.1 must be 0 to 1"),
        ({"sinks": 0}, "sinks=0 must be 1 to 16,777,216"),
        ({"special": "0,1"}, "special='0,1' must be token ids, 0 to 4,194,304"),
        ({"punctuation": "-4"}, "punctuation='-4' must be token ids"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        METHODS.get("fastgen")(**options)


@pytest.mark.parametrize("owner", ["ada", "pyramidkv", "chunkkv", "criticalkv", "simlayerkv"])
def test_it_is_no_score_for_others(owner: str) -> None:
    with pytest.raises(OptionError, match="cannot be the score of another method"):
        METHODS.get(owner)(score="fastgen")
