"""A random Llama that runs at once, a tokenizer of plain words, and tasks made by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from millpond_lab.evals.candidates.candidate import find_candidate
from millpond_lab.evals.decoding.batch import batches, encode
from millpond_lab.evals.decoding.prompt_recording import PromptRecordings
from millpond_lab.evals.decoding.record import Protocol, Record
from millpond_lab.evals.harness.evaluator import Evaluator
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.spec import Spec
from millpond_lab.evals.task import Kind
from tests.helpers.matrix.models import llama

WORDS = ["<pad>", "<bos>", *(f"w{i}" for i in range(2, 96))]


def tiny_model() -> LlamaForCausalLM:
    """In float64, so that what differs by more than rounding differs."""
    return llama("gqa")


@lru_cache
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = WhitespaceSplit()
    core.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", pad_token="<pad>")


def text(length: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS[2:], k=length))


@dataclass(frozen=True)
class TinyTask:
    """Gives the samples that it was made with; an answer is right if it begins with the first reference."""

    kind: Kind = "generate"
    items: tuple[Sample, ...] = field(default_factory=tuple)

    def samples(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> Iterator[Sample]:
        yield from self.items[:count]

    def score(self, question: Question, answer: str) -> float:
        return float(answer.startswith(question.references[0]))


def tiny_samples(count: int = 5, asks: tuple[int, ...] = (1, 3, 2), new: int = 6) -> tuple[Sample, ...]:
    """Contexts of different lengths; each is asked questions of `asks` words, the lengths turned by one per sample."""
    made = []
    for i in range(count):
        turned = asks[i % len(asks) :] + asks[: i % len(asks)]
        questions = tuple(
            Question(
                " " + text(n, 1000 * i + j + 7),
                references=(text(4 + j + i, 50 * i + j),),
                max_new_tokens=new + j,
                choices=(text(2, j), text(1 + i, j + 1), text(3, j + 2)),
                right=j % 3,
            )
            for j, n in enumerate(turned)
        )
        made.append(Sample(f"s{i}", text(24 + 9 * i, i), questions, {"length": 24 + 9 * i}))
    return tuple(made)


def examined(
    task: TinyTask,
    method: str,
    budget: str = "",
    protocol: Protocol = "aware",
    size: int = 1,
    model: LlamaForCausalLM | None = None,
    limit: int | None = 512,
    codec: str = "auto",
    recordings: PromptRecordings | None = None,
) -> list[Record]:
    """The records of all samples of a task."""
    model = model or tiny_model()
    who = find_candidate(Spec.parse(method))
    examiner = Evaluator("cell", model, tiny_tokenizer(), task, who, budget, codec, limit, recordings)
    prompts = [p for s in task.items for p in encode(s, tiny_tokenizer(), task.kind, protocol)]
    return [r for batch in batches(prompts, task.kind, protocol, size) for r in examiner.examine(batch)]


def with_stop(samples: tuple[Sample, ...], stop: str) -> tuple[Sample, ...]:
    return tuple(replace(s, questions=tuple(replace(q, stop=(stop,)) for q in s.questions)) for s in samples)


def save_tiny(folder: Path) -> str:
    """Model and tokenizer as a user would keep them."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
