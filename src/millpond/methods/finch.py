"""Finch: selection of context by the question at the end (Corallo and Papotti, TACL 2024, arXiv:2408.00167)."""

from typing import Annotated

from millpond.methods import method
from millpond.methods._options import GroupReduce, GrowOrEvict, SinksAdded
from millpond.option_ranges import POSITIONS, QUERIES
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.question_attention import QuestionAttention


@method("finch", paper="arXiv:2408.00167")
def finch(
    window: Annotated[int, "tokens of the question, the last of the prompt", QUERIES] = 32,
    chunk: Annotated[int, "positions of a chunk of the context, which all keep the same share; 0: none", POSITIONS] = 0,
    keep_question: Annotated[bool, "the question's own entries always stay"] = True,
    reduce: GroupReduce = "mean",
    sinks: SinksAdded = 0,
    decode: GrowOrEvict = "grow",
) -> Policy:
    """Keep what the question at the prompt's end attends to, from every chunk of the context.

    s_j = sum_i A_ij / n_j over the queries i of the question, n_j the number of them that can see entry j, so that
    entries of the question itself, which fewer queries see, compete fairly with the context. The best entries stay.
    With `chunk` each chunk of the context keeps the same share, and none is forgotten.

    Departs from the paper: it reads the context chunk by chunk with the question after each, and lets later chunks
    see only what was kept; here the prompt is read once and whole, and its chunks are compressed together at its end.
    Read a prompt in passes with between_chunks=False, or each pass is compressed by its own last tokens. Its official
    code multiplies each query's attention by the number of entries that it sees instead. Kept keys stay at their
    positions: the paper turns them to close the gaps, and here these differ from head to head. decode="evict" keeps
    the budget while decoding, by the attention accumulated since the prompt's end.
    """
    return Policy(
        score=QuestionAttention(window, chunk),
        protect=Protect(sinks=sinks, recent=window if keep_question else 0),
        reduce=reduce,
        every_step=decode == "evict",
    )
