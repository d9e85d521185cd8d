"""Public names for packages with methods or evaluation tasks of their own; see docs/tutorial/write-your-own-method.md.

A package names its modules under the entry points `millpond.methods` and `millpond.evals.tasks`.
"""

from millpond.kernels.args import AttentionShape, PrefillArgs, WindowSignalArgs
from millpond.kernels.block_args import BlockSumsArgs, KeyOrder
from millpond.kernels.decode_rules import DecodeRule, Evict, Reduce, Signal
from millpond.kernels.eager.attention import window_probabilities
from millpond.kernels.ops import block_sums, prefill, window_signal
from millpond.methods import make_policy, method
from millpond.option_files import FILE
from millpond.option_pairs import parse_options
from millpond.option_ranges import Range, brief
from millpond.policy.eviction_plan import EvictionPlan
from millpond.policy.head_allocation import Ada, HeadAllocation, PromptHeadAllocation, Uniform
from millpond.policy.layer_allocation import EvenLayers, LayerAllocation, LayerTable, PromptLayers, Pyramid
from millpond.policy.merging import Merge, Merged
from millpond.policy.needs import NOTHING, Needs
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
from millpond.policy.scores.query_moments import QueryMoments, QueryView, Rotate
from millpond.policy.view import View

__all__ = [  # noqa: RUF022 (plainly sorted)
    "AccumulatedAttention",
    "Ada",
    "AttentionShape",
    "BlockSumsArgs",
    "DecodeRule",
    "EvenLayers",
    "Evict",
    "EvictionPlan",
    "FILE",
    "HeadAllocation",
    "KeyOrder",
    "LastAttention",
    "LayerAllocation",
    "LayerTable",
    "LeastAttention",
    "Merge",
    "Merged",
    "NOTHING",
    "Needs",
    "Policy",
    "PrefillArgs",
    "PromptHeadAllocation",
    "PromptLayers",
    "Protect",
    "Pyramid",
    "Queries",
    "QueryMoments",
    "QueryView",
    "RandomPriority",
    "Range",
    "Recency",
    "Reduce",
    "Rotate",
    "Score",
    "Signal",
    "Uniform",
    "View",
    "WindowAttention",
    "WindowSignalArgs",
    "block_sums",
    "brief",
    "make_policy",
    "method",
    "parse_options",
    "prefill",
    "window_probabilities",
    "window_signal",
]
