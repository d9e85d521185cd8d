"""What papers claim, and what came out when it was tried here: a table from committed rows.

A verdict follows from the rows: *reproduced* where the figure, or the whole interval, is on the claim's side; *partly*
where the direction is the paper's and the size is not; *contradicted* where the whole interval is on the other side;
*no difference seen* where it holds both. What has not been run has the command that runs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from generated.claims import answers, formats, h2o, images, layouts, serving, settings, text, trained
from generated.claims.form import Claim
from millpond_lab.bench.common.report import markdown_table

_ALL = (
    *h2o.CLAIMS,
    *text.CLAIMS,
    *settings.CLAIMS,
    *formats.CLAIMS,
    *answers.CLAIMS,
    *images.CLAIMS,
    *trained.CLAIMS,
    *serving.CLAIMS,
    *layouts.CLAIMS,
)
_PAPERS = list(dict.fromkeys(claim.paper for claim in _ALL))
#: Those of one paper together, papers in the order of their first claims.
CLAIMS = tuple(sorted(_ALL, key=lambda claim: _PAPERS.index(claim.paper)))

INTRODUCTION = """\
The same comparisons, tried on models that are at hand; verdicts follow from the rows.
*Partly*: the paper's direction without its size, or a part of the claim.
*Contradicted*: the other direction, beyond the interval.
These models are small: a verdict is about them, not about the paper's.
There are [more pairs of methods](../explanation/orderings.md) on a model of our own, and
[orders of the newest](../board.md#orders-that-papers-state) on two real ones.
"""


def claims_table(claims: Sequence[Claim] = CLAIMS) -> str:
    """How many claims have each verdict, and the table of all."""
    head = ("paper", "it says", "here", "bytes", "model", "rows, script", "verdict")
    lines = [_line(claim) for claim in claims]
    counts = Counter(line[-1] for line in lines).most_common()
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts)
    return f"{len(lines)} claims: {told}.\n\n{markdown_table(head, lines)}"


def _line(claim: Claim) -> tuple[str, ...]:
    if isinstance(claim.tried, str):
        return claim.paper, claim.says, "", "", "", claim.tried, "not run yet"
    found = claim.tried()
    where = f"[{found.rows}](../../benchmarks/results/{found.rows}), `{found.script}`"
    return claim.paper, claim.says, found.figure, found.bytes, found.model, where, found.verdict
