"""BLEU (Papineni et al., 2002), and self-BLEU: how alike several answers are (Zhu et al., arXiv:1802.01886)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from millpond.errors import OptionError
from millpond_lab.evals.metrics.words import units


def bleu(references: Sequence[str], answer: str, order: int = 4) -> float:
    """Geometric mean of the clipped n-gram precisions up to `order`, times the brevity penalty.

    BLEU = min(1, e^(1 - r/c)) prod_n p_n^(1/order), with r the reference length nearest to the answer's length c.

    Example:
        >>> round(bleu(["the mill keeps the water"], "the mill keeps water", order=2), 4)  # e^-1/4 (1 x 2/3)^1/2
        0.6359
    """
    texts, mine = [units(reference) for reference in references], units(answer)
    if not mine:
        return 0.0
    logs = 0.0
    for n in range(1, order + 1):
        best: Counter[tuple[str, ...]] = Counter()
        for text in texts:
            best |= _grams(text, n)
        grams = _grams(mine, n)
        same = (grams & best).total()
        if not same:
            return 0.0
        logs += math.log(same / grams.total()) / order
    nearest = min((abs(len(text) - len(mine)), len(text)) for text in texts)[1]
    return math.exp(logs + min(0.0, 1 - nearest / len(mine)))


def self_bleu(answers: Sequence[str], order: int = 4) -> float:
    """Mean BLEU of each answer against all the others: 1 where all say the same.

    Raises:
        OptionError: fewer than two answers, which are like nothing.

    Example:
        >>> self_bleu(["keep the old mill running", "keep the old mill running"])
        1.0
    """
    if len(answers) < 2:
        raise OptionError(f"self-BLEU compares answers with each other, and {len(answers)} was given; give at least 2")
    scores = [bleu([*answers[:i], *answers[i + 1 :]], answer, order) for i, answer in enumerate(answers)]
    return sum(scores) / len(scores)


def _grams(text: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(text[i:] for i in range(n)), strict=False))
