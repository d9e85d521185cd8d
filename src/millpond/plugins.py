"""Public names for packages with methods or evaluation tasks of their own; see docs/tutorial/write-your-own-method.md.

A package names its modules under the entry points `millpond.methods` and `millpond.evals.tasks`.
"""

from millpond.kernels.decode_rules import DecodeRule, Evict, Reduce, Signal
from millpond.methods import method
from millpond.option_files import FILE
from millpond.option_ranges import Range
from millpond.policy.eviction_plan import EvictionPlan
from millpond.policy.head_allocation import Ada, HeadAllocation, Uniform
from millpond.policy.layer_allocation import LayerAllocation, LayerTable, Pyramid
from millpond.policy.merging import Merge, Merged
from millpond.policy.needs import Needs
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import (
    AccumulatedAttention,
    LastAttention,
    LeastAttention,
    Queries,
    RandomPriority,
    Recency,
    Score,
    WindowAttention,
)
from millpond.policy.view import View

__all__ = [  # noqa: RUF022 (plainly sorted)
    "AccumulatedAttention",
    "Ada",
    "DecodeRule",
    "Evict",
    "EvictionPlan",
    "FILE",
    "HeadAllocation",
    "LastAttention",
    "LayerAllocation",
    "LayerTable",
    "LeastAttention",
    "Merge",
    "Merged",
    "Needs",
    "Policy",
    "Protect",
    "Pyramid",
    "Queries",
    "RandomPriority",
    "Range",
    "Recency",
    "Reduce",
    "Score",
    "Signal",
    "Uniform",
    "View",
    "WindowAttention",
    "method",
]
