"""The demo's task: many questions about one long text, answered from a compressed cache.

This module knows how to ask and to count; it neither prints nor draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.hf.stopwatch import Stopwatch
from millpond.methods import METHODS
from millpond.models.cache_argument import cache_argument
from millpond.models.load import load_tokenizer
from millpond.models.pond import words as w
from millpond.models.pond.exam import draw_paper

PAIRS = 32
ROOM = 7  #: tokens of `<bos>`, a question and its answer
STEPS = 16  #: tokens generated for each question: the answer, and the rest for the clock


@dataclass(frozen=True)
class DemoTask:
    """A text with hidden pairs, the questions about it, and their answers, as token ids."""

    context: Tensor  # (1, L)
    questions: Tensor  # (n, 3)
    answers: Tensor  # (n,)
    pairs: list[int]  # positions of the pairs' words

    @classmethod
    def draw(cls, length: int, questions: int, seed: int) -> DemoTask:
        """A held-out task of `length` words; the first `questions` of its 32 pairs, in random order, are asked.

        Raises:
            OptionError: a length that cannot hold the pairs, or a number of questions out of range.
        """
        paper = draw_paper("recall", seed, 0, length + ROOM, {"pairs": PAIRS, "questions": questions})
        told = {*w.ids(w.NAMES), *w.ids(w.THINGS)}
        return cls(
            torch.from_numpy(paper.text)[None],
            torch.tensor([asked.question for asked in paper.asked]),
            torch.tensor([asked.references[0] for asked in paper.asked]),
            [place for place, word in enumerate(paper.text.tolist()) if word in told],
        )

    @property
    def length(self) -> int:
        """Tokens of the context."""
        return int(self.context.shape[1])

    @property
    def prompts(self) -> Tensor:
        """(n, L + 3) context and question, one row per question."""
        return torch.cat([self.context.expand(len(self.questions), -1), self.questions], 1)


@dataclass(frozen=True)
class DemoOutcome:
    """What one method remembered of the task, and what that took."""

    method: str
    right: int
    asked: int
    kv_bytes: int
    full_kv_bytes: int
    tokens_per_s: float
    kept: list[list[int]]  # positions, one row per (layer, KV head), layers first
    heads: int  # KV heads per layer

    @property
    def share(self) -> float:
        """Of the bytes of a full cache."""
        return self.kv_bytes / self.full_kv_bytes


@torch.inference_mode()
def run_method(
    model: PreTrainedModel, task: DemoTask, method: str, budget: str, codec: str = "auto", **options: Any
) -> DemoOutcome:
    """Answer every question of `task` from a cache that `method` keeps inside `budget`.

    The text is read and compressed once, before any question is known; each question then continues from its own copy
    of that cache. (Were a question read together with the text, its one-word answer would come from the prompt's own
    pass, in which nothing has been evicted yet: every method would be right.)
    """
    chosen = budget if METHODS.get(method)().takes_budget else None
    with compress(model, method, chosen, codec, tokenizer=load_tokenizer("pond-recall"), **options) as cache:
        model(task.context, **cache_argument(cache), logits_to_keep=1)
        held = _held(cache)
        cache.batch_repeat_interleave(len(task.questions))
        watch = Stopwatch()
        out = _generate(model, task.prompts, cache, watch)
        right = int((out[:, task.prompts.shape[1] + 1] == task.answers).sum())  # first the name, then the thing
    return DemoOutcome(method, right, len(task.answers), tokens_per_s=_rate(watch, len(task.answers)), **held)


def _generate(model: Any, prompts: Tensor, cache: MillpondCache, watch: Stopwatch) -> Tensor:
    out: Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        **cache_argument(cache),
        streamer=watch,
        do_sample=False,
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
    )
    return out


def _held(cache: MillpondCache) -> dict[str, Any]:
    """Bytes and positions of a cache with one sequence."""
    stats = cache.stats()
    kept = [cache.positions(layer) for layer in cache.entry_layers]
    return {
        "kv_bytes": stats.kv_bytes,
        "full_kv_bytes": stats.full_kv_bytes,
        "kept": [row for rows in kept for row in rows],
        "heads": len(kept[0]),
    }


def _rate(watch: Stopwatch, sequences: int) -> float:
    """Tokens per second of the whole batch in its fastest step: what else the machine does slows only the others."""
    return sequences / min(watch.steps)
