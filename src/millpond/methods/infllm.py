"""InfLLM: retrieval of blocks from a full memory (Xiao et al., NeurIPS 2024, arXiv:2402.04617)."""

from typing import Annotated, Literal

from millpond.errors import OptionError
from millpond.methods import method
from millpond.option_ranges import POSITIONS, SOME_POSITIONS, Range
from millpond.policy.policy import Policy
from millpond.policy.variants.block_retrieval import AlwaysAttended, BlockRetrievalPolicy


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
) -> Policy:
    """Store everything, and attend to sinks, the newest entries and the blocks that fit the query best.

    No memory is saved: the budget says how much a query attends to. When `block` entries have left the local window
    they become a block. r_j = sum_i A_ij over the queries i that had j in their window; per query head the mean of the
    `representatives` keys with the highest r, before RoPE, stands for the block. A query looks up the blocks of highest
    sum_h <q_h, mean_bh>, one set for all heads; a prompt does so for `together` queries at once, by their mean, among
    the blocks that were there before them. Local entries have their true distances. All others are local - 1 positions
    away: q is rotated by that, keys not at all. One softmax goes over both. Entries that fill no block yet are attended
    to as far ones. budget = sinks + local + block + looked-up blocks, so the paper's setting of 16 blocks is
    budget=6400, local=4096, sinks=128, block=128.

    Departs from the paper: as in the official code r sums attention after the softmax. A query whose text fits into
    the budget attends to all of it at true distances. The blocks stay in the page pool, where the paper moves them to
    the host's memory. Layers with a sliding window attend as ever. Defaults are smaller than the paper's, in proportion
    to budgets of some hundred entries. Prompts in chunks give the same result where chunks hold whole multiples of
    `together`; by default all of a prompt is read in one pass. Lookups run in torch operations, while decoding
    sequence by sequence: a step takes several times as long as one over the whole cache.
    """
    if isinstance(local, float) and local >= 1:
        raise OptionError(f"infllm: local={local} is a share of the budget, below 1; give a whole number for a count")
    return BlockRetrievalPolicy(
        protect=AlwaysAttended(sinks=sinks, recent=local, block=block),
        representatives=representatives,
        together=together,
        far=far,
    )
