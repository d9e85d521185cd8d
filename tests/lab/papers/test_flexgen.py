"""FlexGen's cost model gives what the released one gives, on the T4 that its constants are of."""

from __future__ import annotations

import pytest

from millpond.errors import BudgetError, OptionError
from millpond_lab.papers.flexgen import GB, T4, OptWorkload, estimate, search, solve

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


def by_hand(
    shares: dict[str, float],
    gpu_batch: int = 8,
    n_batches: int = 3,
    machine: dict[str, float] | None = None,
    **load: int,
) -> tuple[float, float]:
    """Seconds of a layer in prefill and in decoding, of weights that stay on a GPU with all the room."""
    numbers = {"layers": 2, "width": 1024, "ffn": 4096, "heads": 16, "prompt": 64, "new": 9} | load
    room = T4(gpu_bytes=1e15, cpu_bytes=1e15, disk_bytes=1e15, **machine or {})
    found = estimate({"wg": 1.0, "hg": 1.0} | shares, gpu_batch, n_batches, OptWorkload(**numbers), room)
    return found.prefill_s / numbers["layers"], found.decode_s / numbers["layers"] / (numbers["new"] - 1)


def test_a_cache_on_disk_takes_the_time_of_the_disk() -> None:
    """64 prompt tokens and one drawn are written in prefill; in a step 64 + 9 / 2 are read and one is written."""
    prefill, decode = by_hand({"cn": 1.0})
    cache = 4 * 65 * 1024 * 24  # keys and values of 2 bytes, 24 sequences
    assert prefill == pytest.approx(cache / (0.97 * GB) + cache / (0.746 * GB))
    seen = 4 * 24 * (64 + 4.5) * 1024
    assert decode == pytest.approx(seen / (0.473 * GB))
    assert by_hand({"cn": 0.5, "cc": 0.5})[1] == pytest.approx(seen / 2 / (0.473 * GB))
    # an answer to one token, on a disk that writes a thousand times slower: what is written in a step
    slow = by_hand({"cn": 1.0}, machine={"ctod_g": 2.015e6}, prompt=1, new=2)[1]
    assert slow == pytest.approx(4 * 24 * 1024 / 2.015e6)


def test_a_cache_of_the_cpu_is_attended_at_its_rate_for_batch_and_width() -> None:
    """A batch of 8 is 3 halvings of 64 and a width of 1,024 is 2 of 4,096: both slow it, together a little less."""
    load = {"prompt": 256}
    seen = 4 * 24 * (256 + 4.5) * 1024
    products = 24 * (8 * 1024**2 + 4 * 1024 * 4096) / 4.3e12
    rate = 0.0123e12 * (1 + 0.0168 * 3 * 2 - 0.0328 * 3 - 0.0621 * 2)
    assert by_hand({"cc": 1.0}, **load)[1] == pytest.approx(seen / rate + products)
    assert by_hand({"cg": 1.0}, **load)[1] == pytest.approx(seen / 0.079e12 + products)
    wide = 4 * 192 * (256 + 4.5) * 4096
    found = by_hand({"cc": 1.0}, 64, 3, width=4096, ffn=16384, **load)[1]
    assert found == pytest.approx(wide / 0.0123e12 + 192 * (8 * 4096**2 + 4 * 4096 * 16384) / 4.3e12)


def test_hidden_states_elsewhere_take_the_time_of_their_links() -> None:
    hidden_p, hidden_g = 2 * 64 * 1024 * 24, 2 * 1024 * 24
    products_p = 24 * (8 * 64 * 1024**2 + 4 * 64 * 1024 * 4096) / 21.24e12 + 4 * 24 * 64**2 * 1024 / 9.97e12
    prefill, decode = by_hand({"cg": 1.0, "hg": 0.0, "hn": 1.0})
    down = hidden_p / (4.82 * GB) + hidden_p / (2.015 * GB)
    up = hidden_p / (12.89 * GB) + hidden_p / (0.473 * GB)
    assert prefill == pytest.approx(max(up, down, products_p))
    assert up > products_p
    products_g = 24 * (8 * 1024**2 + 4 * 1024 * 4096) / 4.3e12 + 4 * 24 * 68.5 * 1024 / 0.079e12
    assert decode == pytest.approx(hidden_g / (12.89 * GB) + max(hidden_g / (0.473 * GB), products_g))


@pytest.mark.parametrize(
    ("shares", "tier", "needed"),
    [
        # 4 bytes of 73 tokens, 1,024 numbers, 24 sequences, 2 layers; the layer itself is 25,165,824 bytes
        ({"cn": 1.0}, "disk_bytes", 4 * 73 * 1024 * 24 * 2),
        ({"cg": 1.0, "wg": 0.0, "wn": 1.0}, "disk_bytes", 2 * 25_165_824),
        ({"cg": 1.0, "hg": 0.0, "hn": 1.0}, "disk_bytes", 2 * 64 * 1024 * 24),
        # in a step: two batches of 8 on their way from the disk, and of one its scores and states
        ({"cn": 1.0}, "cpu_bytes", 8 * 73 * 1024 * 8 + 2 * 16 * 73 * 8 + 2 * 1024 * 8),
        ({"cc": 1.0, "wg": 0.0, "wc": 1.0}, "cpu_bytes", 3 * 25_165_824 + 4 * 64 * 1024 * 24 * 2),
    ],
)
def test_a_policy_needs_what_lies_in_a_tier(shares: dict[str, float], tier: str, needed: int) -> None:
    load = OptWorkload(layers=2, width=1024, ffn=4096, heads=16, prompt=64, new=9)
    room = {"gpu_bytes": 1e15, "cpu_bytes": 1e15, "disk_bytes": 1e15}

    def fits(nbytes: float) -> bool:
        machine = T4(**room | {tier: nbytes}, alpha_g=1.0, alpha_c=1.0, alpha_n=1.0)
        try:
            estimate({"wg": 1.0, "hg": 1.0} | shares, 8, 3, load, machine)
        except BudgetError:
            return False
        return True

    assert fits(needed)
    assert not fits(needed - 1)
