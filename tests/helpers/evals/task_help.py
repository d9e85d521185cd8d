"""Helpers of the tests of tasks: a tokenizer of words, the real one beside the checkout, small files."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from millpond_lab.evals.sample import Sample
from millpond_lab.evals.task import TASKS, Task

DATA = Path(__file__).parents[4] / "shared" / "data"


@cache
def word_tokenizer() -> PreTrainedTokenizerBase:
    """One token for each run of letters and digits, and for each run of other marks."""
    tokenizer = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


#: Marks around what each role says, and the head of an answer.
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerBase:
    """The tokenizer of words, with a chat template of its own."""
    tokenizer = copy.deepcopy(word_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


@cache
def gpt2() -> PreTrainedTokenizerBase:
    """GPT-2's tokenizer; skips where it does not lie beside the checkout."""
    if not (DATA / "tokenizers" / "gpt2").is_dir():
        pytest.skip("the GPT-2 tokenizer does not lie beside the checkout")
    return AutoTokenizer.from_pretrained(DATA / "tokenizers" / "gpt2")


def data(name: str) -> str:
    """The path of a data file; skips where it does not lie beside the checkout."""
    if not (DATA / name).is_file():
        pytest.skip(f"{name} does not lie beside the checkout")
    return str(DATA / name)


def build(name: str, **options: Any) -> Task:
    return TASKS.get(name)(**options)


def draw(task: Task, tokenizer: PreTrainedTokenizerBase, count: int = 1, seed: int = 0) -> list[Sample]:
    return list(task.samples(tokenizer, count, seed))


def count(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def total(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> int:
    """Tokens of the context, and of the question that is longest with its answer."""
    longest = max(count(tokenizer, question.text) + question.max_new_tokens for question in sample.questions)
    return len(tokenizer(sample.context)["input_ids"]) + longest


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    text = "\n".join(json.dumps(row) for row in rows) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)
