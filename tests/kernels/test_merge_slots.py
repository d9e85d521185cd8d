"""`merge_slots`, and the means and likenesses of links: the native kernels against plain torch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels import native, ops
from millpond.kernels.args import MergeArgs
from millpond.kernels.decode_rules import DecodeRule, Evict
from millpond.kernels.merge import reference
from millpond.kernels.merge import rules as merge_rules
from millpond.kernels.merge.rules import MergeRule, Over, Weigh
from millpond.kernels.native import library
from tests.helpers.examples import examples
from tests.helpers.kernels.make import Call, Case

pytestmark = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
#: of numbers about 1, against sums in another order
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
RULES = {
    "norms": MergeRule(Weigh.NORMS, threshold=0.1),
    "exp": MergeRule(Weigh.EXP, closed=3, rate=0.7),
    "count": MergeRule(Weigh.COUNT, rate=0.5),
    "score": MergeRule(Weigh.SCORE, threshold=0.05, cover=1.0, most=4.0),
    "score_some": MergeRule(Weigh.SCORE, closed=2, threshold=-1.0, cover=0.7, most=0.3),
    "next": MergeRule(Weigh.CHANCE, targets=3),
    "next_all": MergeRule(Weigh.CHANCE, over=Over.MAX, average=True),
    "next_recent": MergeRule(Weigh.CHANCE, closed=4, targets=5, over=Over.RECENT, bias=True, masses=True),
    "next_draw": MergeRule(Weigh.CHANCE, targets=4, draw=True),
}


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is plain torch in all its parts."""
    monkeypatch.setenv("MILLPOND_KERNELS", "reference")


def merged(
    call: Call, rule: MergeRule, leave: DecodeRule, by_native: bool, local: Tensor | None = None
) -> list[Tensor]:
    """What the regions hold afterwards, in the order of positions, with lengths and thresholds."""
    call = call.clone()
    memory = torch.full((call.case.n_seq,), float("nan"), dtype=torch.float64)
    memory[1:] = 0.4
    run = native.merge_slots if by_native else reference.merge_slots
    run(MergeArgs(call.regions, call.caps, call.recent, call.q_pos, memory, leave, rule, local))
    parts = [*call.contents(), call.masses()]
    order = torch.where(parts[2] < 0, 2**31 - 1, parts[2]).argsort(dim=1)  # type: ignore[operator]
    found = [p.gather(1, order if p.ndim == 2 else order[..., None].expand_as(p)) for p in parts if p is not None]
    return [*found, call.lens, memory]


def same(call: Call, rule: MergeRule, leave: DecodeRule, local: Tensor | None = None) -> list[Tensor]:
    ours, theirs = (merged(call, rule, leave, native_, local) for native_ in (True, False))
    for a, b in zip(ours, theirs, strict=True):
        bound = TOLERANCE.get(a.dtype, 1e-6)
        assert a.shape == b.shape
        assert torch.allclose(a.double(), b.double(), rtol=bound, atol=bound, equal_nan=True)
    return ours


def stored(rule: MergeRule, masses: bool) -> MergeRule:
    """The rule for slots with masses or without; means by mass need them."""
    return replace(rule, masses=masses, bias=rule.bias and masses)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Call, MergeRule, DecodeRule]:
    n_seq, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    lens = draw(st.lists(st.integers(0, 70), min_size=n_seq * heads, max_size=n_seq * heads))
    leaving = draw(st.sampled_from([1, 1, 3, 9]))
    case = Case(
        lens=lens,
        n_seq=n_seq,
        n_kv_heads=heads,
        group=2,
        key_dim=draw(st.sampled_from([4, 16, 24, 33])),
        value_dim=draw(st.sampled_from([4, 16, 40])),
        slots=draw(st.sampled_from([4, 16])),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        caps=[max(1, n - draw(st.integers(0, leaving))) for n in lens],
        recent=[draw(st.integers(0, max(0, n // 4))) for n in lens],
        inactive={1} if draw(st.booleans()) else set(),
        masses=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )
    rule = stored(draw(st.sampled_from(list(RULES.values()))), case.masses)
    evict = draw(st.sampled_from([Evict.ACC, Evict.ACC_MEAN, Evict.OLDEST, Evict.RANDOM]))
    evict = Evict.ACC if rule.weigh is Weigh.SCORE else evict
    return case.build(), rule, DecodeRule(evict=evict, sinks=draw(st.integers(0, 3)), seed=5)


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(cases())
def test_native_against_plain_torch(drawn: tuple[Call, MergeRule, DecodeRule]) -> None:
    same(*drawn)


@pytest.mark.covering
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("masses", [False, True])
def test_every_instruction_set(name: str, masses: bool, isa: str, two_threads: None) -> None:
    lens = [300, 280, 0, 60, 500, 41]
    case = Case(
        lens,
        n_seq=3,
        n_kv_heads=2,
        group=2,
        caps=[n - 2 if n else 1 for n in lens],
        recent=[9] * 6,
        masses=masses,
        slots=16,
        dtype=torch.bfloat16,
        inactive={1},
    )
    call, rule = case.build(), stored(RULES[name], masses)
    leave = DecodeRule(evict=Evict.OLDEST if rule.weigh is Weigh.CHANCE else Evict.ACC, sinks=2)
    found = same(call, rule, leave)
    assert found[-2].tolist() == [298, 278, 0, 60, 498, 39]  # the second sequence takes no part
    before = merged(call, replace(rule, weigh=Weigh.NORMS, threshold=9.0), leave, True)
    assert torch.equal(before[2], found[2])
    assert not torch.equal(before[1], found[1]) or name == "score_some"  # something was taken in
    assert torch.isnan(found[-1][0]) == (rule.weigh not in (Weigh.EXP, Weigh.COUNT))


def test_thresholds_are_of_sequences_and_stay_where_nothing_leaves() -> None:
    case = Case([40, 30, 50, 20], n_seq=2, n_kv_heads=2, caps=[39, 29, 50, 20])
    found = same(case.build(), RULES["exp"], DecodeRule(evict=Evict.ACC))
    assert torch.isfinite(found[-1][0])
    assert float(found[-1][1]) == 0.4


def test_value_of_all_along_and_now() -> None:
    case = Case([60, 50], n_kv_heads=2, caps=[57, 47], recent=[4, 4], masses=True)
    local = torch.rand(2, 60, generator=torch.Generator().manual_seed(3))
    rule = replace(RULES["score"], masses=True)
    found = same(case.build(), rule, DecodeRule(), local)
    assert not torch.equal(found[2], merged(case.build(), rule, DecodeRule(evict=Evict.ACC), True)[2])


def test_equal_entries_go_to_the_oldest() -> None:
    call = Case([6], caps=[5]).build()
    for keys in call.pages.keys:
        keys.fill_(1.0)
    for values in call.pages.values:
        values.fill_(2.0)
    before = call.contents()[2][0].sort().values
    found = same(call, RULES["exp"], DecodeRule(evict=Evict.OLDEST))
    assert found[2][0, :5].tolist() == before[1:].tolist()
    assert (found[1] - 2).abs().max() < 1e-6
    masses = replace(call.case, masses=True).build()
    for keys in masses.pages.keys:
        keys.fill_(1.0)
    for log_masses in masses.pages.log_masses:
        log_masses.zero_()
    rule = replace(RULES["exp"], closed=0, masses=True)
    assert same(masses, rule, DecodeRule(evict=Evict.OLDEST))[4][0, :5].exp().tolist() == pytest.approx([2, 1, 1, 1, 1])


def test_the_op_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 pages, and MILLPOND_KERNELS=reference, run in plain torch; others natively; all say the same."""
    results = []
    for forced, dtype in (("auto", torch.float32), ("reference", torch.float32), ("auto", torch.float64)):
        monkeypatch.setenv("MILLPOND_KERNELS", forced)
        call = Case([30, 20], n_kv_heads=2, caps=[28, 19], dtype=dtype).build()
        memory = torch.full((1,), float("nan"), dtype=torch.float64)
        rules = DecodeRule(evict=Evict.ACC), RULES["exp"]
        ops.merge_slots(MergeArgs(call.regions, call.caps, call.recent, call.q_pos, memory, *rules))
        results.append(float(memory))
    assert results == pytest.approx([results[0]] * 3, rel=1e-6)


def test_what_is_written_in_place_must_allow_it() -> None:
    call = Case([4]).build()
    merge = (call.regions, call.caps, call.recent, call.q_pos)
    with pytest.raises(OptionError, match="contiguous float64"):
        native.merge_slots(MergeArgs(*merge, torch.zeros(1), DecodeRule(), RULES["norms"]))


# ------------------------------------------------------------------------------------------- dense rows


@settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 4),
    st.integers(1, 150),
    st.sampled_from([3, 16, 64, 130]),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from([-math.inf, -0.5, 0.0, 0.2, 0.6]),
    st.integers(0, 999),
)
def test_likeness_and_means(
    heads: int, n: int, dim: int, share: float, both: bool, dtype: torch.dtype, floor: float, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(heads, n, d, generator=make).to(dtype) for d in (dim, 24))
    targets = torch.rand(heads, n, generator=make) < share
    sources = ~targets & (torch.rand(heads, n, generator=make) < 0.8)
    found = native.nearest(keys, values if both else None, sources, targets, floor)
    alike = merge_rules.in_both(keys, values) if both else merge_rules.cosines(keys)
    into, best = merge_rules.nearest_in_torch(alike, sources, targets, floor)
    near = (torch.maximum(found[1], best) - floor).abs() < 2e-6  # rounding may put it on either side of the floor
    found = torch.where(near, into, found[0]), torch.where(near, best, found[1])
    assert torch.allclose(found[1], best, atol=2e-6)
    column = torch.arange(n).expand_as(into)
    chosen = torch.stack([alike(column, column).gather(2, i[..., None])[..., 0] for i in (found[0], into)])
    assert torch.allclose(chosen[0], chosen[1], atol=2e-6)  # the same, or one that is as alike
    taken = merge_rules.Links(into, torch.isfinite(best))
    weight, own = torch.rand(heads, n, generator=make), torch.rand(heads, n, generator=make) + 0.1
    means = merge_rules.mean_in_torch(values, weight, own, taken)
    assert torch.allclose(native.mean_rows(values, weight, own, *taken), means, atol=1e-5)


def test_means_by_mass_need_masses() -> None:
    with pytest.raises(OptionError, match="needs slots that have masses"):
        MergeRule(Weigh.CHANCE, bias=True)


def test_a_target_that_is_not_above_the_floor_is_none() -> None:
    """Two targets have the value of the source, and only one of these has its key."""
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.3, 1.0]]])
    values = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]])
    sources = torch.tensor([[True, False, False, False]])
    for floor, into, alike in ((0.6, 2, 0.995), (0.999, 0, -math.inf)):
        for find in (native.nearest, merge_rules.nearest):
            found = find(keys, values, sources, ~sources, floor)
            assert found[0].tolist() == [[into, 1, 2, 3]]
            assert found[1][0, 0].item() == pytest.approx(alike, abs=1e-3)


def test_ties_go_to_the_oldest_in_any_lane() -> None:
    n = 200
    keys = torch.randn(1, 1, 16).expand(1, n, -1).contiguous()
    targets = torch.zeros(1, n, dtype=torch.bool)
    targets[0, 37::3] = True
    into, alike = native.nearest(keys, None, ~targets, targets, -math.inf)
    assert (into[~targets] == 37).all()
    assert torch.allclose(alike[~targets], torch.ones(1, dtype=torch.float64))
