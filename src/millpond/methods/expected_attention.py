"""Expected Attention: predicted attention of future queries (Devoto et al., 2025, arXiv:2510.00636)."""

from typing import Annotated, Literal

from millpond.methods import method
from millpond.methods._options import GrowInPaper, Recent
from millpond.option_ranges import POSITIONS, Range
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.expected_attention import ExpectedAttentionScore


@method("expected_attention", paper="arXiv:2510.00636")
def expected_attention(
    future: Annotated[
        int, "positions to come over which the rotation of the queries is averaged", Range(1, 4096)
    ] = 512,
    covariance: Annotated[bool, "use the covariance of the queries, not only their mean"] = True,
    value_norms: Annotated[bool, "weigh the attention by the length of the values"] = True,
    eps: Annotated[float, "added to the attention before it is weighed", Range(0.0, 1e6)] = 0.0,
    reduce: Annotated[Literal["mean", "max"], "query heads of a GQA group to their KV head"] = "mean",
    sinks: Annotated[int, "first positions that always stay, and whose queries do not count", POSITIONS] = 4,
    recent: Recent = 0,
    decode: GrowInPaper = "grow",
) -> Policy:
    """Keep the entries that later queries should attend to and whose values are long, without seeing a question.

    The prompt's queries before RoPE are taken for a Gaussian with mean mu and covariance Sigma; R is the mean of the
    rotations of the next `future` positions. Entry j then expects z_j = exp(k_j.R mu / sqrt d + k_j^T R Sigma R^T k_j
    / 2d), a_j = z_j / sum_i z_i of each query head, and s_j = (a_j + eps) ||v_j||, averaged over a group.

    Queries are rotated back exactly, so that models which normalise them (Qwen3, Gemma 3) work too; without rotary
    positions R is 1. A model that limits its logits (Gemma 2) is taken as if it did not.

    Departs from the paper: there each layer's budget is shared by its heads; that is ada with this as its score.
    decode="evict" continues with the queries of each step, and each ends with a plan, which is slow; the paper waits
    for a number of steps.
    """
    return Policy(
        score=ExpectedAttentionScore(future, covariance, value_norms, eps, reduce),
        protect=Protect(sinks=sinks, recent=recent),
        every_step=decode == "evict",
        once=decode == "once",
    )
