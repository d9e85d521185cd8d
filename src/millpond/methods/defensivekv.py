"""DefensiveKV: entries by the worst that any query of a window makes of them (ICLR 2026, arXiv:2510.13334)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.kernels.decode_rules import Evict, Signal
from millpond.methods import method
from millpond.methods._base import across_layers
from millpond.methods._options import GrowInPaper, SinksAdded
from millpond.methods.criticalkv import effect_norms
from millpond.option_ranges import POOL_WIDTHS, QUERIES, SHARE, Range
from millpond.policy.head_allocation import Ada
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class WorstRisk:
    """s_j = max(R_j, mean_j R_j) * n_j / sum n with R_j = max_i max_h P_ij.

    Before come the entries of a first stage, which carry most attention. P_ij is the attention of query i of the window
    and query head h of the group, pooled over neighbours and brought back to the sum of its row. n_j is
    mean_h ||v_j W_h||_1, and the sum runs over all entries and heads of the layer.

    Attributes:
        window: Queries that are observed.
        kernel: Width of the average pool over neighbouring positions.
        mass: Share of a head's attention that the entries of the first stage carry, with the window's own.
        numbers: Numbers of the output that a norm is summed over; 0 for all.
    """

    window: int = 32
    kernel: int = 5
    mass: float = 0.9
    numbers: int = 256
    queries: Queries = "window"
    signal: Signal = Signal.SUM
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        norms = effect_norms(view.stored("values"), view.output_maps, self.numbers)
        before = view.before_window(self.window)
        risks, first = zip(*(self._head(view, head, before[head]) for head in range(len(before))), strict=True)
        norms = norms.masked_fill(~before, 0)
        effect = torch.stack(risks) * norms / norms.sum().clamp(min=torch.finfo(norms.dtype).tiny)
        return effect + torch.stack(first).to(effect.dtype)  # an effect is at most 1

    def _head(self, view: View, head: int, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return a head's risks, (N,) float32, and which are of the first stage, (N,) bool."""
        rows = view.window_rows(head).float()
        attention = rows.masked_fill(~before, 0)
        risk = _at_least_the_mean(pooled_rows(attention, before, self.kernel).amax((0, 1)), before)
        mean = rows.mean((0, 1)).masked_fill(~view.valid[head], 0)
        free = before & view.free[head]
        rest = self.mass - mean.masked_fill(free, 0).sum()
        heaviest, order = mean.masked_fill(~free, 0).sort(descending=True, stable=True)
        needed = (heaviest.cumsum(0) - heaviest < rest) & (heaviest > 0)  # those before do not carry it yet
        room = max(view.budget - int((view.valid[head] & ~view.free[head]).sum()), 0)
        needed &= torch.arange(len(needed), device=needed.device) < room
        return risk, torch.zeros_like(needed).scatter_(0, order, needed)


def pooled_rows(attention: Tensor, inside: Tensor, kernel: int) -> Tensor:
    """Return rows (group, w, N) averaged over neighbours, each with the sum that it had.

    Entries that are not `inside` (N,) have 0, before and after. Padding counts as 0.
    """
    pooled = F.avg_pool1d(attention, kernel, stride=1, padding=kernel // 2).masked_fill(~inside, 0)
    tiny = torch.finfo(pooled.dtype).tiny
    return pooled * (attention.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp(min=tiny))


def _at_least_the_mean(worst: Tensor, inside: Tensor) -> Tensor:
    """Return the numbers (N,) raised to the mean of those `inside`."""
    mean = worst.masked_fill(~inside, 0).sum() / inside.sum().clamp(min=1)
    return worst.clamp(min=mean)


@method("defensivekv", paper="arXiv:2510.13334")
def defensivekv(
    window: Annotated[int, "queries at the prompt's end that are observed; their entries always stay", QUERIES] = 32,
    kernel: Annotated[int, "width of the average pool over neighbouring positions", POOL_WIDTHS] = 5,
    mass: Annotated[float, "share of a head's attention that stays whatever its values are, 0 to 1", SHARE] = 0.9,
    across: Annotated[bool, "the heads of all layers compete for one budget (Layer-DefensiveKV)"] = False,
    numbers: Annotated[
        int, "numbers of the output, evenly spread, that a norm is summed over; 0 for all", Range(0, 2**20)
    ] = 256,
    sinks: SinksAdded = 0,
    decode: GrowInPaper = "grow",
) -> Policy:
    """Keep what any query of a window may need, by the largest attention, not the mean.

    R_j = max_i max_h P_ij over the queries i of the window and the query heads h of the group, P the pooled attention;
    max(R_j, mean_j R_j) lifts what was hardly observed to the head's mean risk. It is weighed by ||v_j W_O||_1, the
    mean over the group. Before, the fewest entries that carry `mass` of a head's mean attention, together with the
    window's, are chosen by attention alone. The heads of a layer compete without a floor, and with `across` those of
    all layers, which is Layer-DefensiveKV.

    Departs from the official code, which measures the window's attention on the 32 tokens before it, and divides the
    norms of a token by their sum over the KV heads, so that its values' length cancels out. Here they are divided by
    the sum over all entries and heads of the layer, as the paper is said to. A budget below the window's size chooses
    nothing by attention (there nearly everything). The norm takes at most `numbers` numbers of an output.
    """
    policy = Policy(
        score=WorstRisk(window, kernel, mass, numbers),
        protect=Protect(sinks=sinks, recent=window),
        every_step=decode == "evict",
        once=decode == "once",
    )
    return across_layers("defensivekv", replace(policy, heads=Ada(alpha=0.0)), across)
