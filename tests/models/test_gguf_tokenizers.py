"""Tokenizers of GGUF files: the ids are llama.cpp's, for every rule that is read, and others are refused by name."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.gguf.architectures import write_architecture
from tests.helpers.gguf.files import TEMPLATE, write_gguf
from tests.helpers.gguf.llamacpp_tokens import cases, expected, smollm2_cases, texts_of, write_case
from tests.helpers.gguf.vocabulary import CONTROL, Vocabulary, byte_pairs, pieces, write_vocabulary
from transformers import AutoTokenizer

from millpond.errors import DataError, OptionError
from millpond.models.downloads import find_download
from millpond.models.gguf import convert
from millpond.models.gguf.converted import NOTE
from millpond.models.gguf.tokenizer import PRE_TOKENIZERS, UnnamedSplitWarning, gguf_tokenizer
from millpond.models.load import load_tokenizer

TEXT = "then the rain, \u00fcber them"
#: Architecture, kind of the tokenizer, tokens of " the"; SentencePiece writes a blank before all text but Gemma's.
CASES = [
    ("llama", "gpt2", 1),
    ("llama", "llama", 2),
    ("phi3", "llama", 2),
    ("gemma2", "llama", 1),
    ("gemma3", "llama", 1),
    ("gemma3", "gemma4", 1),
]
#: How many of the 201 texts llama.cpp cuts otherwise than the tokenizers that the models were trained with.
CASED = ("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")
OTHERWISE = dict.fromkeys(CASED, 26) | {"deepseek-coder": 4, "deepseek-llm": 4, "superbpe": 1}
SMOLLM2 = find_download("smollm2-135m")


@pytest.mark.parametrize(("architecture", "kind", "n_the"), CASES)
def test_text_goes_there_and_back(
    architecture: str, kind: str, n_the: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    write_architecture(tmp_path / "tiny.gguf", architecture, tokenizer=kind)
    tokenizer = load_tokenizer(tmp_path / "tiny.gguf")
    stock = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in (TEXT, f"{TEXT}\n", "a  b"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == stock.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(TEXT, add_special_tokens=False)) < len(TEXT)  # not bytes alone
    assert len(tokenizer.encode(" the", add_special_tokens=False)) == n_the
    assert tokenizer.encode("the") == stock.encode("the")  # with the special tokens that the file asks for
    assert tokenizer.chat_template == TEMPLATE


@lru_cache
def _expected() -> dict[str, dict[str, list[list[int]]]]:
    return expected()


@lru_cache
def _cases() -> dict[tuple[str, str], tuple[Vocabulary, dict[str, Any]]]:
    return {(group, name): (vocabulary, more) for group, name, vocabulary, more in cases()}


def _compare(group: str, name: str, vocabulary: Vocabulary, more: dict[str, Any], folder: Path) -> list[str]:
    """The texts whose ids differ from llama.cpp's."""
    write_case(folder / "tiny.gguf", vocabulary, more)
    tokenizer = gguf_tokenizer(folder / "tiny.gguf")
    found = [tokenizer.encode(text, add_special_tokens=False) for text in texts_of(group)]
    assert sum(map(len, found)) > 3 * len(found)
    return [
        text
        for text, ours, theirs in zip(texts_of(group), found, _expected()[group][name], strict=True)
        if ours != theirs
    ]


@pytest.mark.parametrize(
    ("group", "name"),
    [
        *(("byte pairs", rule) for rule in sorted(PRE_TOKENIZERS)),
        ("pieces", "blank first"),
        ("pieces", "no blank first"),
        ("gemma4", "gemma4"),
    ],
)
def test_ids_are_those_of_llamacpp(group: str, name: str, tmp_path: Path) -> None:
    """Of 201 texts, with a small vocabulary in which each cut shows."""
    differ = _compare(group, name, *_cases()[group, name], tmp_path)
    assert len(differ) == OTHERWISE.get(name, 0), differ
    for text in differ:  # llama.cpp's expressions know no marks and no case beyond ASCII, and its blanks are ASCII's
        kinds = {unicodedata.category(c) for c in text if ord(c) > 127}
        reason = {"Lu", "Ll", "Mn", "Mc", "Me"} if name in CASED else {"Zs", "Zl", "Nd"}
        assert kinds & reason, text


@pytest.mark.slow
@pytest.mark.skipif(
    not (SMOLLM2 and SMOLLM2.at_hand), reason="needs the vocabulary of SmolLM2: millpond models get smollm2-135m"
)
def test_ids_are_those_of_llamacpp_with_the_vocabulary_of_smollm2(tmp_path: Path) -> None:
    wrong = {
        name: differ
        for group, name, vocabulary, more in smollm2_cases()
        if (differ := _compare(group, name, vocabulary, more, tmp_path))
    }
    assert not wrong


@pytest.mark.skipif(not (SMOLLM2 and SMOLLM2.at_hand), reason="needs SmolLM2: millpond models get smollm2-135m")
def test_smollm2_reads_fractions_as_it_was_trained() -> None:
    assert SMOLLM2 is not None
    tokenizer = gguf_tokenizer(SMOLLM2.file)
    assert tokenizer.encode("a \u00bd cup") == [81, 216, 16738, 7118]
    theirs = dict(zip(texts_of("smollm2"), _expected()["smollm2"]["smollm"], strict=True))
    for text in ("\u00b2\u00b3 x\u00b2 y\u2081", "\u2460\u2461\u2462 \u2469", "\u2163 \u2167", "1234567"):
        assert tokenizer.encode(text) == theirs[text]


def test_a_rule_that_is_not_known_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is converted, with the way out."""
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    small = byte_pairs()
    for more in ({"pre": "kimi-k2"}, {"pre": "smollm3" * 50}):
        write_case(tmp_path / "tiny.gguf", small, more)
        name = more["pre"][:80]
        with pytest.raises(
            OptionError, match=f"'{name}' .tokenizer.ggml.pre.*use the model's safetensors and .*smollm"
        ):
            load_tokenizer(tmp_path / "tiny.gguf")
        with pytest.raises(OptionError, match=r"tokenizer\.ggml\.pre"):
            gguf_tokenizer(tmp_path / "tiny.gguf")
    for kind in ("t5", "bert", "rwkv"):
        write_case(tmp_path / "tiny.gguf", replace(small, kind=kind), {})
        with pytest.raises(OptionError, match=f"of the kind '{kind}' .*gpt2, llama, gemma4.*safetensors"):
            load_tokenizer(tmp_path / "tiny.gguf")
    assert not [*tmp_path.glob("cache/gguf/*/*")]


def test_a_file_that_names_no_rule_is_cut_as_llamacpp_does_and_it_is_said(tmp_path: Path) -> None:
    for more in ({"pre": ""}, {}):
        write_case(tmp_path / "tiny.gguf", byte_pairs(), more)
        with pytest.warns(UnnamedSplitWarning, match=r"tiny\.gguf does not say .*tokenizer\.ggml\.pre.*newer conv"):
            tokenizer = gguf_tokenizer(tmp_path / "tiny.gguf")
    texts = texts_of("byte pairs")
    assert [tokenizer.encode(text) for text in texts] == _expected()["byte pairs"]["default"]


def test_special_tokens_of_letters_that_no_bytes_spell(tmp_path: Path) -> None:
    """As DeepSeek has them: whole, with their ids, and text as it was."""
    small = byte_pairs()
    special = ["<\uff5cUser\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"]
    n = len(small.tokens)
    write_vocabulary(
        tmp_path / "tiny.gguf",
        replace(
            small,
            tokens=[*small.tokens, *special],
            types=[*small.types, CONTROL, 4],
            more={"pre": "deepseek-r1-qwen", "bos_token_id": n, "eos_token_id": n + 1, "add_bos_token": True},
        ),
    )
    tokenizer = gguf_tokenizer(tmp_path / "tiny.gguf")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (n, n + 1, n + 2)
    ids = tokenizer.encode(f"{special[0]}hi{special[1]}")
    assert [*ids[:2], ids[-1]] == [n, n, n + 1]
    assert tokenizer.decode(ids[1:]) == f"{special[0]}hi{special[1]}"
    assert tokenizer.decode(ids[1:], skip_special_tokens=True) == "hi"  # the end is special, though its type is not


@pytest.mark.parametrize(
    ("rule", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)]
)
def test_the_first_token_is_added_where_llamacpp_adds_it(rule: str, begins: bool, tmp_path: Path) -> None:
    small = byte_pairs()
    write_case(tmp_path / "tiny.gguf", small, {"pre": rule})
    assert (gguf_tokenizer(tmp_path / "tiny.gguf").encode("hi")[0] == small.more["bos_token_id"]) is begins
    write_case(tmp_path / "tiny.gguf", small, {"pre": rule, "add_bos_token": not begins, "add_eos_token": True})
    tokenizer = gguf_tokenizer(tmp_path / "tiny.gguf")
    assert (tokenizer.encode("hi")[0] == small.more["bos_token_id"]) is not begins
    assert tokenizer.encode("hi")[-1] == small.more["eos_token_id"]


def test_blanks_behind_special_tokens_of_phi3_are_dropped(tmp_path: Path) -> None:
    for name, same in (("Phi-3 tiny", True), ("tiny", False)):
        write_vocabulary(tmp_path / "tiny.gguf", pieces("llama"), name=name)
        tokenizer = gguf_tokenizer(tmp_path / "tiny.gguf")
        assert (tokenizer.encode("<|end|>\na") == tokenizer.encode("<|end|>a")) is same


def test_transformers_puts_no_rule_of_its_own_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For Qwen's type it would, of a folder that was converted."""
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", "qwen2")
    loaded, built = load_tokenizer(tmp_path / "tiny.gguf"), gguf_tokenizer(tmp_path / "tiny.gguf")
    texts = [*texts_of("byte pairs"), "e\u0301"]
    assert [loaded.encode(text) for text in texts] == [built.encode(text) for text in texts]
    assert loaded.decode(loaded.encode("e\u0301")) == "e\u0301"


def test_what_an_earlier_version_converted_gets_its_tokenizer_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    folder = convert.converted_folder(path)
    wanted = (folder / "tokenizer.json").read_bytes()
    note = json.loads((folder / NOTE).read_text())
    del note["tokenizer"]
    (folder / NOTE).write_text(json.dumps(note))
    (folder / "tokenizer.json").write_text("{}")
    weights = (folder / "model.safetensors").stat()
    assert convert.converted_folder(path) == folder
    assert (folder / "tokenizer.json").read_bytes() == wanted
    assert (folder / "model.safetensors").stat() == weights
    monkeypatch.setattr(convert, "gguf_tokenizer", None)  # once
    assert convert.converted_folder(path) == folder
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


SMALL = Vocabulary("gpt2", ["a", "b", "ab"], [1, 1, 1], ["a b"], more={"pre": "gpt-2"})
PIECES = Vocabulary("llama", ["<unk>", "a", "b"], [2, 1, 1], scores=[0.0, -1.0, -2.0], more={"eos_token_id": 2})
DAMAGED = [
    (replace(SMALL, tokens=["a", "b", "ab", "b"]), "1 of its tokens are there twice"),
    (replace(SMALL, types=[1, 1]), "3 tokens and the types of 2"),
    (replace(SMALL, merges=["a c"]), "one of its merges is of texts that are no tokens"),
    (replace(SMALL, merges=["a"]), "one of its merges is of texts that are no tokens"),
    (replace(SMALL, merges=["b a"]), "out of vocabulary|no tokens"),
    (replace(SMALL, merges=[]), "it lists no merges"),
    (replace(SMALL, tokens=["a", "b", "ab", "x" * 1001], types=[1] * 4), "a token has 1,001 characters"),
    (replace(SMALL, more={"pre": "gpt-2", "bos_token_id": 3}), "'bos' has the id 3, and it has 3 tokens"),
    (replace(SMALL, more={"pre": "gpt-2", "eos_token_id": "a"}), "'eos' has the id 'a'"),
    (replace(PIECES, scores=[0.0, 1.0]), "3 tokens and the scores of 2"),
    (replace(PIECES, scores=[]), "tokenizer.ggml.scores is no list"),
]


def test_a_damaged_tokenizer_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(convert, "_load", None)
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(TypeError):  # what follows
        convert.converted_folder(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(whole.replace("\u0120 the".encode(), b"Q the\x00", 1))
    with pytest.raises(DataError, match=r"the tokenizer is damaged .*no tokens"):
        convert.converted_folder(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(("vocabulary", "why"), DAMAGED, ids=range(len(DAMAGED)))
def test_lists_that_contradict_each_other_are_refused(vocabulary: Vocabulary, why: str, tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "tiny.gguf", vocabulary)
    with pytest.raises(DataError, match=f"tiny.gguf: the tokenizer is damaged .*({why})"):
        gguf_tokenizer(tmp_path / "tiny.gguf")
