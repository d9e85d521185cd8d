"""Accuracy of a model with its full cache: the upper bound for every method.

Plain transformers: the text is read once, then each question alone follows it on its own copy of the cache.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel

from millpond.models.cache_argument import cache_argument
from millpond_lab.pond.exam import Paper, draw_paper
from millpond_lab.pond.facts import FactQuestion

MOST_QUESTIONS = 8  # of a paper
QUESTIONS = {
    "frequent_words": 1,
    "common_words": 1,
    "niah_single": 1,
    "niah_multiquery": 4,
    "tracking": 4,
    "copy": 4,
    "niah_multikey": 4,
}


def papers_of(task: str, questions: int) -> int:
    """Number of papers of a task with at least this many questions."""
    return -(-questions // QUESTIONS.get(task, MOST_QUESTIONS))


@torch.inference_mode()
def evaluate_task(model: PreTrainedModel, task: str, *, length: int, papers: int = 16, seed: int = 0) -> float:
    """Share of right words over held-out papers, each answer decoded greedily.

    Args:
        model: any causal model over the vocabulary of `pond-recall`, on any device.
        task: of `millpond_lab.pond.exam.TASKS`.
        length: tokens of a paper. papers: how many. seed: names them; the same for every model to be compared.
    """
    knobs = {"questions": QUESTIONS.get(task, MOST_QUESTIONS)}
    shares = [share for i in range(papers) for share in _answer(model, draw_paper(task, seed, i, length, knobs))]
    return sum(shares) / len(shares)


def _answer(model: PreTrainedModel, paper: Paper) -> list[float]:
    """The share of right words of each question of one paper."""
    cache = DynamicCache(config=model.config)
    model(torch.from_numpy(paper.text)[None].to(model.device), **cache_argument(cache), logits_to_keep=1)
    seen = cache.get_seq_length()
    shares = []
    for asked in paper.asked:
        shares.append(_share(model, cache, asked))
        cache.crop(seen - cache.get_seq_length())
    return shares


def _share(model: PreTrainedModel, cache: DynamicCache, asked: FactQuestion) -> float:
    """Decode one answer; the share of the words that count which stand where they should."""
    ids, answer, right = torch.tensor([asked.question]), list[int](), 0
    for place, counts in enumerate(asked.scored[:-1]):
        logits = model(ids.to(model.device), **cache_argument(cache), logits_to_keep=1).logits[0, -1]
        ids = logits.argmax()[None, None]
        right += counts and int(ids) in asked.accepted(place, answer)
        answer.append(int(ids))
    return right / len(asked.references)
