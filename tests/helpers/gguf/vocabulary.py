"""GGUF files that hold a vocabulary and no tensors, and small vocabularies for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tests.helpers.gguf.texts import TEXTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BLANK = "\u2581"


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says of a tokenizer.

    Attributes:
        kind: "gpt2", "llama" or "gemma4". more: other keys behind "tokenizer.ggml.".
    """

    kind: str
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    more: Mapping[str, bool | int | str] = field(default_factory=dict)


def write_vocabulary(path: Path, vocabulary: Vocabulary, *, name: str = "tiny", architecture: str = "llama") -> None:
    """Write a file without tensors."""
    writer = GGUFWriter(str(path), architecture)
    writer.add_name(name)
    numbers = {
        "context_length": 64,
        "embedding_length": 8,
        "block_count": 1,
        "feed_forward_length": 8,
        "attention.head_count": 1,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.merges:
        writer.add_token_merges(list(vocabulary.merges))
    if vocabulary.scores:
        writer.add_token_scores(list(vocabulary.scores))
    for key, given in vocabulary.more.items():
        add: Any = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(given)]
        add(f"tokenizer.ggml.{key}", given)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def byte_pairs(n_merges: int = 1500) -> Vocabulary:
    """Pairs of bytes learned without any cut, so that each cut that a rule makes or leaves out changes tokens."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=256 + n_merges, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_plain(), trainer)
    merges = _merges(backend)
    learned = dict.fromkeys([*alphabet, *(pair.replace(" ", "") for pair in merges)])
    whole = [word for word in ("\u0120sure", "\u0120won", "HER", "\u0120rain") if word not in learned]  # by no merges
    assert whole
    tokens = [*learned, *whole, "<|begin|>", "<|end|>"]
    types = [NORMAL] * (len(tokens) - 2) + [CONTROL, USER_DEFINED]
    more = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
    return Vocabulary("gpt2", tokens, types, merges, more=more)


def pieces(kind: str, n_merges: int = 800) -> Vocabulary:
    """Pieces in which a blank is a character; every third character of the texts is in none, and is written in bytes.

    Args:
        kind: "llama" (by scores) or "gemma4" (by merges).
    """
    characters = sorted({*"".join(TEXTS)} - {*" \n"})
    alphabet = [BLANK, *([] if kind == "llama" else ["\n"]), *(c for i, c in enumerate(characters) if i % 3)]
    backend = Tokenizer(BPE())
    trainer = BpeTrainer(
        vocab_size=len(alphabet) + n_merges,
        min_frequency=1,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    known = {*alphabet}
    cut = ["".join(c for c in text.replace(" ", BLANK) if c in known) for text in _plain()]
    backend.train_from_iterator([BLANK + text for text in cut] if kind == "llama" else cut, trainer)
    merges = _merges(backend)
    special = ["<unk>", "<|begin|>", "<|end|>"]
    learned = dict.fromkeys([*alphabet, *(pair.replace(" ", "") for pair in merges)])
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    tokens = [*special, *bytes_, *learned, "    "]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(learned), USER_DEFINED]
    more = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    if kind == "gemma4":
        return Vocabulary(kind, tokens, types, merges, more=more)
    scores = [0.0] * 259 + [-1.0 - i for i in range(len(learned))] + [0.0]
    return Vocabulary(kind, tokens, types, scores=scores, more=more)


def _plain() -> list[str]:
    """The texts but for special tokens, which no merges make."""
    return [text for text in TEXTS if "<|" not in text]


def _merges(backend: Tokenizer) -> list[str]:
    return [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
