"""VATP: attention times the size of the value (Guo et al., EMNLP 2024, arXiv:2406.12335)."""

from typing import Annotated, Literal

from torch import Tensor

from millpond.plugins import Evict, Policy, Protect, Queries, Range, Signal, View, method


class AttentionTimesValue:
    """s_j = ||v_j||_1 sum_i A_ij over every query i since entry j was written."""

    queries: Queries = "all"  # at prefill: the attention of every query of the prompt
    window: int = 0
    signal: Signal = Signal.SUM  # while decoding: the kernel goes on adding it up
    evict: Evict | None = None  # no order of the kernel is this one

    def score(self, view: View, seed: int) -> Tensor:
        assert view.signal is not None, "the cache hands over what `signal` asks for"
        return view.signal * view.values.abs().sum(-1)  # (H, N) * (H, N)


@method("vatp", paper="arXiv:2406.12335")
def vatp(
    recent: Annotated[
        int | float,
        "newest entries that stay: a share of the budget (0.5) or a count (128)",
        Range(0, 2**24),
        Range(0.0, 1.0),
    ] = 0.5,
    sinks: Annotated[int, "first positions that always stay", Range(0, 2**24)] = 4,
    decode: Annotated[Literal["grow", "evict"], "after the prompt: grow, or evict at each step"] = "grow",
) -> Policy:
    """Keep the entries of much attention and large values."""
    return Policy(AttentionTimesValue(), Protect(sinks=sinks, recent=recent), every_step=decode == "evict")
