"""Arguments of the ops that follow a decoding step: merging, and the rules of heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millpond.kernels.args.regions import PageRegions
from millpond.kernels.decode_rules import DecodeRule
from millpond.kernels.merge.rules import MergeRule


@dataclass(frozen=True, slots=True)
class MergeArgs:
    """The regions of S sequences, and what becomes of the entries beyond their caps.

    Attributes:
        regions: written, memory and lens.
        caps, recent: (R,) int32, see `StepRegions`.
        q_pos: (S,) int32, the newest position of each sequence; -1: it takes no part.
        memory: (S,) float64, the threshold of each sequence that a rule moves, NaN for none; written.
        leave: the eviction rule. Its signal, reduce, decay and shared mean nothing here.
        rule: what becomes of it.
        local: (R, n) float32 or None, by slot: the attention of the latest queries. The value of an entry is then
            max(acc, local * sum acc / sum local), with the sums over the region, whatever `leave` says.
    """

    regions: PageRegions
    caps: Tensor
    recent: Tensor
    q_pos: Tensor
    memory: Tensor
    leave: DecodeRule
    rule: MergeRule
    local: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadRuleArgs:
    """The regions of S sequences, and what the rule of each KV head reads.

    Attributes:
        regions: written, memory and lens.
        sequences: (n,) int64, which to read.
        ids: (S, width) int64, the token id at each position.
        classes: (c,) int8, the class of each token id, the last for all ids beyond.
        kinds: (R,) int64, the rule of each region.
        local: (R,) int32, newest positions that a local rule keeps.
        seen, quota, most: (n,) int64, of each sequence the tokens so far, the frequent entries of a head, and the
            entries of all heads together.
        sinks: positions below count as special.
        window: 0 or w: what is w after the next query leaves.
    """

    regions: PageRegions
    sequences: Tensor
    ids: Tensor
    classes: Tensor
    kinds: Tensor
    local: Tensor
    seen: Tensor
    quota: Tensor
    most: Tensor
    sinks: int
    window: int
