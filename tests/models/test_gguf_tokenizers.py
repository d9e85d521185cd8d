"""Tokenizers of GGUF files: text goes there and back, and the ids are those of transformers' own conversion."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from tests.helpers.gguf.architectures import write_architecture
from tests.helpers.gguf.files import TEMPLATE
from transformers import AutoTokenizer

from millpond.models.load import load_tokenizer

TEXT = "then the rain, \u00fcber them"
#: Architecture, kind of the tokenizer, tokens of " the"; SentencePiece writes no blank before a text's first word.
CASES = [
    ("llama", "gpt2", 1), ("llama", "llama", 1), ("phi3", "llama", 2), ("gemma2", "llama", 1), ("gemma3", "llama", 1),
    ("gemma3", "gemma4", 1), ("llama", "t5", 1),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "kind", "n_the"), CASES)
def test_text_goes_there_and_back(
    architecture: str, kind: str, n_the: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    write_architecture(tmp_path / "tiny.gguf", architecture, tokenizer=kind)
    tokenizer = load_tokenizer(tmp_path / "tiny.gguf")
    stock = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    # unigram pieces of T5 have no bytes for a line's end, and join blanks
    for text in [TEXT] if kind == "t5" else [TEXT, f"{TEXT}\n", "a  b"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == stock.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(TEXT, add_special_tokens=False)) < len(TEXT)  # not bytes alone
    assert len(tokenizer.encode(" the", add_special_tokens=False)) == n_the
    assert tokenizer.encode("the") == stock.encode("the")  # with the special tokens that the file asks for
    assert tokenizer.chat_template == TEMPLATE


def test_every_kind_that_transformers_converts_is_tested() -> None:
    kinds = import_module("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_TOKENIZER_TYPES
    assert {kind for _, kind, _ in CASES} == {*kinds}
