"""The demo's task: many questions about one long text, answered from a compressed cache.

This module knows how to ask and to count; it neither prints nor draws.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import OptionError
from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.hf.stopwatch import Stopwatch
from millpond.methods import METHODS
from millpond.models.cache_argument import cache_argument
from millpond.models.installed import BUNDLED
from millpond.models.load import load_tokenizer
from millpond.optional import require

#: The exam that comes with the model, and the module that draws others.
FILE, EXAMS = BUNDLED / "pond-recall" / "demo.json", "millpond_lab.pond.demo_file"
PAIRS = 32
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
        """Return a held-out task of `length` words, with some of its 32 pairs as questions.

        The text of 2,048 words and seed 0 comes with the model; another one is drawn by millpond-lab.

        Args:
            length: Words of the text.
            questions: Questions, of the first pairs, in random order.
            seed: Seed of the text.

        Raises:
            OptionError: a length that cannot hold the pairs, a number of questions out of range, or another text than
                that of the model without millpond-lab.
        """
        exam = json.loads(FILE.read_text(encoding="utf-8"))
        if (exam["length"], exam["seed"]) != (length, seed):
            exam = require(EXAMS, "lab", "demo with another --length or --seed").demo_exam(length, seed)
        if not 1 <= questions <= PAIRS:
            raise OptionError(f"questions={questions}: the text answers 1 to {PAIRS}")
        told = {*(name for _, name, _ in exam["questions"]), *exam["answers"]}
        return cls(
            torch.tensor([exam["text"]]),
            torch.tensor(exam["questions"][:questions]),
            torch.tensor(exam["answers"][:questions]),
            [position for position, word in enumerate(exam["text"]) if word in told],
        )

    def beginning(self, length: int) -> DemoTask:
        """Return a short run of the same kind: the first `length` tokens and one question.

        The tokens need not answer the question.
        """
        return replace(
            self, context=self.context[:, :length], questions=self.questions[:1], answers=self.answers[:1], pairs=[]
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
    """Memory of one method of the task, and its cost."""

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
    used_budget = budget if METHODS.get(method)().takes_budget else None
    with compress(model, method, used_budget, codec, tokenizer=load_tokenizer("pond-recall"), **options) as cache:
        model(task.context, **cache_argument(cache), logits_to_keep=1)
        sizes = _held(cache)
        cache.batch_repeat_interleave(len(task.questions))
        watch = Stopwatch()
        out = _generate(model, task.prompts, cache, watch)
        right = int((out[:, task.prompts.shape[1] + 1] == task.answers).sum())  # first the name, then the thing
    return DemoOutcome(method, right, len(task.answers), tokens_per_s=_rate(watch, len(task.answers)), **sizes)


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
    """Return the bytes and positions of a cache with one sequence."""
    stats = cache.stats()
    kept = [cache.positions(layer) for layer in cache.entry_layers]
    return {
        "kv_bytes": stats.kv_bytes,
        "full_kv_bytes": stats.full_kv_bytes,
        "kept": [row for rows in kept for row in rows],
        "heads": len(kept[0]),
    }


def _rate(watch: Stopwatch, sequences: int) -> float:
    """Return tokens per second of the whole batch in its fastest step.

    Other work of the machine slows only the other steps.
    """
    return sequences / min(watch.steps)
