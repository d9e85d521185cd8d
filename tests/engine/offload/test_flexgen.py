"""FlexGen's cost model gives what the released one gives, on the T4 that its constants are of."""

from __future__ import annotations

import pytest

from millpond.engine.offload.flexgen import GB, T4, OptWorkload, estimate, search, solve
from millpond.errors import BudgetError, OptionError

pytest.importorskip("scipy", reason="the linear program needs scipy")

PUBLISHED = {"wg": 0.2, "wc": 0.8, "cc": 1.0, "hc": 1.0}  # 20-80-0-100-0-100
MACHINE = T4(gpu_bytes=16 * GB, cpu_bytes=200 * GB)
WIDER = T4(gpu_bytes=16 * GB, cpu_bytes=200 * GB, alpha_g=1.2, alpha_c=1.2, alpha_n=1.2)


def test_the_published_policy_of_opt_30b_takes_the_published_time() -> None:
    fixed = estimate(PUBLISHED, 48, 3, machine=WIDER)
    assert fixed.seconds == pytest.approx(645.76, abs=0.005)
    assert fixed.tokens_per_s == pytest.approx(7.136, abs=0.0005)
    assert fixed.prefill_s == pytest.approx(210.7, abs=0.05)
    assert fixed.decode_s == pytest.approx(435.1, abs=0.05)


def test_it_does_not_fit_without_the_wider_alpha() -> None:
    with pytest.raises(BudgetError, match=r"needs 18\.\d GB of a tier that has 12\.8 GB"):
        estimate(PUBLISHED, 48, 3, machine=MACHINE)


def test_the_linear_program_finds_the_official_time() -> None:
    """Only the time: its optimum is degenerate, with .10 of the weights or .05 of the cache on disk."""
    found = solve(32, 5, machine=MACHINE)
    assert found is not None
    assert found.seconds == pytest.approx(721.66, abs=0.005)
    assert found.tokens_per_s == pytest.approx(7.095, abs=0.0005)
    for kind in "wch":
        assert sum(share for place, share in found.shares.items() if place[0] == kind) == pytest.approx(1)


def test_no_placement_is_faster_than_the_solved_one() -> None:
    best, load = solve(32, 5, machine=MACHINE), OptWorkload()
    assert best is not None
    for wg, wc, cc in ((0.12, 0.78, 1.0), (0.05, 0.85, 1.0), (0.1, 0.85, 0.95), (0.0, 0.8, 0.9)):
        shares = {"wg": wg, "wc": wc, "wn": 1 - wg - wc, "cc": cc, "cn": 1 - cc, "hc": 1.0}
        assert estimate(shares, 32, 5, load, MACHINE).seconds >= best.seconds - 1e-6


@pytest.mark.slow
def test_the_search_is_at_least_as_good_as_the_official_one() -> None:
    assert search(machine=MACHINE).tokens_per_s >= 7.09


def test_what_does_not_fit_has_no_placement() -> None:
    tiny = T4(gpu_bytes=GB // 2, cpu_bytes=GB, disk_bytes=GB)
    assert solve(1, 1, machine=tiny) is None
    with pytest.raises(BudgetError, match="no policy"):
        search(machine=tiny)


def test_unknown_places_and_empty_batches_are_refused() -> None:
    with pytest.raises(OptionError, match="unknown places"):
        estimate({"wx": 1.0}, 1, 1)
    with pytest.raises(OptionError, match="give at least 1"):
        solve(0, 1)


def test_weights_on_disk_take_the_time_of_the_disk() -> None:
    """Worked by hand: 12 layers of 1,024; a decoding step uploads a layer and reads it at 95 % of the disk's speed."""
    load = OptWorkload(layers=12, width=1024, ffn=4096, heads=16, prompt=64, new=9)
    machine = T4(cpu_bytes=1000 * GB)
    found = estimate({"wn": 1.0, "cg": 1.0, "hg": 1.0}, 1, 1, load, machine)
    layer_bytes = 8 * 1024**2 + 4 * 1024 * 4096
    seconds = layer_bytes / (12.89 * GB) + layer_bytes / (0.95 * 0.473 * GB)
    assert found.decode_s == pytest.approx(12 * 8 * seconds)
    assert found.prefill_s == pytest.approx(12 * (layer_bytes / (12.89 * GB) + layer_bytes / (0.473 * GB)))
