"""A tiny corpus and a tiny recipe: `pond-text` in a second."""

from __future__ import annotations

import random
from pathlib import Path

from millpond_lab.train.text.recipe import Tasks, TextRecipe

TINY = TextRecipe(
    "tiny",
    "pond-tiny",
    hidden=16,
    ffn=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    tokens=1600,
    tokens_per_step=128,
    context=128,
    vocab_size=420,
    lengths=((0.0, 64), (0.75, 128)),
    warmup_steps=2,
    tasks=((0.0, Tasks(0.3, 0.3, 0.3)), (0.6, Tasks(0.2, 0.2, 0.1))),
)

WORDS = (
    "the",
    "a",
    "cat",
    "dog",
    "river",
    "house",
    "quiet",
    "old",
    "ran",
    "slept",
    "and",
    "saw",
    "near",
    "under",
    "bridge",
)


def write_corpus(folder: Path) -> Path:
    """Two training documents, one in `gutenberg`, and a held-out one; returns `folder`."""
    (folder / "gutenberg").mkdir(parents=True)
    for number, name in enumerate(("plain.txt", "gutenberg/novel.txt", "gutenberg/great_expectations.txt")):
        (folder / name).write_bytes(_prose(number).encode())
    return folder


def _prose(number: int) -> str:
    """Sentences of the few words, in paragraphs with Windows line breaks."""
    rng = random.Random(number)
    sentences = [" ".join(rng.choices(WORDS, k=rng.randint(4, 9))) + f" {rng.randint(1, 99)}." for _ in range(300)]
    paragraphs = [" ".join(sentences[i : i + 5]) for i in range(0, 300, 5)]
    return "\r\n\r\n\r\n".join(paragraphs) + "\r\n"
