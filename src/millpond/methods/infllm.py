"""InfLLM: retrieval of blocks from a full memory (Xiao et al., NeurIPS 2024, arXiv:2402.04617)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from millpond.codec.spec import Codec
from millpond.errors import BudgetError, OptionError
from millpond.methods import method
from millpond.option_ranges import POSITIONS, SOME_POSITIONS, Range, check_parts
from millpond.policy.codec_refusal import WAY_OUT
from millpond.policy.needs import Needs, Offload
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect

#: Queries of a prompt that look up one set of blocks, by default.
TOGETHER = 512


@dataclass(frozen=True, slots=True)
class AlwaysAttended(Protect):
    """Entries that every query sees: sinks, the newest, and those that fill no block yet.

    Attributes:
        recent: The newest positions: a count or a share of the budget, never none or all of it.
        block: Entries that are looked up together.
    """

    recent: int | float = 0.5
    block: int = 32

    def __post_init__(self) -> None:
        Protect.__post_init__(self)
        if self.block < 1:
            raise OptionError(f"block={self.block} must be at least 1")
        if self.recent == 0 or self.recent == 1.0:
            raise OptionError(f"local={self.recent} must be a count of at least 1, or a share above 0 and below 1")

    def local(self, budget: int) -> int:
        """Return the newest positions that a query sees, its own among them."""
        return max(1, math.floor(self.recent * budget) if isinstance(self.recent, float) else self.recent)

    def blocks(self, budget: int) -> int:
        """Return the blocks that fit besides what is always attended."""
        return (budget - self.sinks - self.local(budget) - self.block) // self.block

    def minimum(self) -> int:
        """Return the smallest budget that leaves room for a block that is looked up."""
        attended = self.sinks + 2 * self.block
        if isinstance(self.recent, float):  # the first budget of which the share leaves `attended`
            return math.floor((attended - 1) / (1 - self.recent)) + 1
        return attended + self.recent

    def check(self, budget: int) -> None:
        """Check that sinks, newest entries and one block fit into `budget`.

        Raises:
            BudgetError: no block could be looked up.
        """
        if budget < self.minimum():
            raise BudgetError(
                f"budget {budget} is smaller than {self.minimum()}: sinks {self.sinks}, local {self.recent}, one block "
                f"of {self.block} that fills up and one that is looked up; raise budget, or lower sinks, local or block"
            )


@dataclass(frozen=True, slots=True)
class BlockRetrievalPolicy(Policy):
    """Policy that stores everything; its budget is how much of it a query attends to.

    Attributes:
        protect: Entries that are always attended.
        representatives: Entries of a block whose mean key stands for it.
        together: Queries of a prompt that look up one set of blocks.
        far: Where a looked-up entry stands: all at one distance, after the local ones, or where the text put them.
        offload: Where blocks lie.
    """

    protect: AlwaysAttended = field(default_factory=AlwaysAttended)
    representatives: int = 4
    together: int = TOGETHER
    far: Literal["one_distance", "true"] = "one_distance"
    offload: Offload = "auto"

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        for name in ("representatives", "together"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} must be at least 1")
        if self.representatives > self.protect.block:
            raise OptionError(f"representatives={self.representatives} of a block of {self.protect.block}; take fewer")

    def check_prompt(self, n_tokens: int) -> None:
        Policy.check_prompt(self, n_tokens)
        check_parts("together", self.together, TOGETHER, n_tokens)

    @property
    def needs(self) -> Needs:
        return Needs(whole_prompt=True, block_lookup=self)

    @property
    def takes_budget(self) -> bool:
        """The budget limits attended entries."""
        return True

    @property
    def needs_unrotated_queries(self) -> bool:
        """Blocks are compared, and looked up, by keys before RoPE."""
        return True

    def kept_refusal(self) -> str | None:
        return (
            "this method holds every token and each query attends to the blocks that it looks up, so that no span is "
            "sure to be seen; use a method that evicts"
        )

    def codec_refusal(self, codec: Codec) -> str | None:
        if self.offload == "none":
            return f"this method looks single positions up in plain pages; give offload='host', or {WAY_OUT}"
        special = codec.rotated or codec.balanced or codec.prune or codec.tiered or codec.calibrated or codec.pre_rope
        if special or codec.key_scales is not None:
            return f"this method stores blocks in formats of plain groups, such as 'kivi4' or 'int8'; {WAY_OUT}"
        if self.protect.block % codec.slots:
            return (
                f"it groups {codec.slots} entries, and a block has {self.protect.block}; give block={codec.slots} or a "
                "multiple of it"
            )
        return None


@method("infllm", paper="arXiv:2402.04617")
def infllm(
    local: Annotated[
        int | float,
        "newest positions that are always attended: a share of the budget or a count; the paper has 4096",
        SOME_POSITIONS,
        Range(0.0, 1.0, above=True),
    ] = 0.5,
    sinks: Annotated[int, "first positions that are always attended; the paper has 128", POSITIONS] = 16,
    block: Annotated[int, "entries that are looked up together; the paper has 128", SOME_POSITIONS] = 32,
    representatives: Annotated[int, "entries whose mean key stands for their block", SOME_POSITIONS] = 4,
    together: Annotated[
        int, "queries of a prompt that look up the same blocks; while decoding each asks alone", SOME_POSITIONS
    ] = 512,
    far: Annotated[
        Literal["one_distance", "true"], "sinks and looked-up entries stand right after the local ones, or in place"
    ] = "one_distance",
    offload: Annotated[
        Offload, "blocks lie in the pool (none), in host memory or in files; auto: host, if the pool is a GPU's"
    ] = "auto",
) -> Policy:
    """Store everything; attend to sinks, newest entries and blocks that fit the query best.

    The budget says how much a query attends to, and blocks lie where `offload` says. When `block` entries have left the
    local window they become a block. r_j = sum_i A_ij over the queries i that had j in their window; per query head the
    mean of the `representatives` keys with the highest r, before RoPE, stands for the block. A query looks up the
    blocks of highest sum_h <q_h, mean_bh>, one set for all heads; a prompt does so for `together` queries at once, by
    their mean, among the blocks that were there before them. Local entries have their true distances. All others are
    local - 1 positions away: q is rotated by that, keys not at all. One softmax goes over both. Entries that fill no
    block yet are attended to as far ones. budget = sinks + local + block + looked-up blocks, so the paper's setting of
    16 blocks is budget=6400, local=4096, sinks=128, block=128. Blocks that have left the pool are read when they are
    looked up, and no others; with a codec they are stored in it, and sinks and newest entries as they are.

    Departs from the paper: as in the official code r sums attention after the softmax. A query whose text fits into
    the budget attends to all of it at true distances. On a GPU all blocks leave the pool for the host's memory, where
    the paper keeps recently used ones on the GPU; on a CPU, whose pool is the host's memory, they stay unless `offload`
    moves them. They leave when the pass that completes them ends. An engine whose blocks leave reads prompts in pieces
    of whole multiples of `together` and reserves sinks, newest entries, a block and a piece for each request, and the
    blocks themselves where they are in the same memory; elsewhere a prompt is read in one pass, and is in the pool as a
    whole. Layers with a sliding window attend as ever. Defaults are smaller than the paper's, in proportion to budgets
    of some hundred entries. Prompts in chunks give the same result where chunks hold whole multiples of `together`.
    Lookups run in torch operations,
    while decoding sequence by sequence: a step takes several times as long as one over the whole cache.
    """
    if isinstance(local, float) and local >= 1:
        raise OptionError(f"infllm: local={local} is a share of the budget, below 1; give a whole number for a count")
    return BlockRetrievalPolicy(
        protect=AlwaysAttended(sinks=sinks, recent=local, block=block),
        representatives=representatives,
        together=together,
        far=far,
        offload=offload,
    )
