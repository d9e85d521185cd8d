"""Tokenizers of GGUF files, built from their vocabulary so that they give the ids that llama.cpp gives."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from millpond.errors import DataError, OptionError
from millpond.models.gguf.header import GGUFHeader, read_header
from millpond.models.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

#: Written into converted folders; with another number there the tokenizer is made again.
TOKENIZER_VERSION = 2
_TOKENS, _SCORES, _TYPES, _MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))
#: Kinds of vocabulary (tokenizer.ggml.model): pairs of bytes, pieces by their scores, and pieces by their merges.
_BYTE_PAIRS, _PIECES, _GEMMA4 = KINDS = ("gpt2", "llama", "gemma4")
#: Types of tokens (tokenizer.ggml.token_type).
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
#: Ids of special tokens where a file of pieces names none.
_USUAL = {"bos": 1, "eos": 2, "unknown": 0}
_BLANK = "\u2581"
#: Characters of a token: all halves of a piece are looked up.
_LONGEST = 1000
_WAY_OUT = "use the model's safetensors and tokenizer files instead"


class UnnamedSplitWarning(UserWarning):
    """Warning of a GGUF file without the rule that cuts its text before tokens are merged."""


def check_tokenizer(path: Path, header: GGUFHeader) -> None:
    """Refuse a vocabulary of an unknown kind, or with an unknown rule that cuts its text.

    Raises:
        OptionError: with the name that the file gives.
    """
    if not header.has_tokenizer:
        return
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind not in KINDS:
        raise OptionError(
            f"{path.name} has a tokenizer of the kind {str(kind)[:80]!r} (tokenizer.ggml.model), and those of "
            f"{', '.join(KINDS)} are read; {_WAY_OUT}"
        )
    if kind == _BYTE_PAIRS and (rule := _rule(header)) not in PRE_TOKENIZERS:
        raise OptionError(
            f"{path.name} cuts its text by the rule {rule[:80]!r} (tokenizer.ggml.pre), which is not known here, so "
            f"that the model would read other tokens than it has learned; {_WAY_OUT}. Known: "
            f"{', '.join(sorted(PRE_TOKENIZERS))}"
        )


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a GGUF file, with its special tokens and its chat template.

    Raises:
        DataError: its lists do not go together.
        OptionError: it is of a kind that is not read, see `check_tokenizer`.
    """
    header = read_header(path, (_TOKENS, _SCORES, _TYPES, _MERGES))
    check_tokenizer(path, header)
    return _Builder(path, header).tokenizer()


def _rule(header: GGUFHeader) -> str:
    return str(header.metadata.get("tokenizer.ggml.pre") or "default")


class _Builder:
    """Builder of a tokenizer from the metadata of a file."""

    def __init__(self, path: Path, header: GGUFHeader) -> None:
        self._path, self._given = path, header.metadata
        self._kind: str = header.metadata["tokenizer.ggml.model"]
        self._rule = _rule(header)
        self._gemma = header.architecture.startswith("gemma")
        # llama.cpp names a token without a text so
        self._tokens: list[str] = [token or f"[EMPTY_{i}]" for i, token in enumerate(self._list(_TOKENS, str))]
        self._types = self._list(_TYPES, int) if _TYPES in self._given else [1] * len(self._tokens)
        self._vocab = {token: i for i, token in enumerate(self._tokens)}
        if len(self._vocab) < len(self._tokens):
            self._refuse(f"{len(self._tokens) - len(self._vocab):,} of its tokens are there twice")
        if len(self._types) != len(self._tokens):
            self._refuse(f"it has {len(self._tokens):,} tokens and the types of {len(self._types):,}")
        if (longest := max(map(len, self._tokens))) > _LONGEST:
            self._refuse(f"a token has {longest:,} characters; at most {_LONGEST:,} are possible")

    def tokenizer(self) -> PreTrainedTokenizerFast:
        try:
            named = {name: self._named(name) for name in ("bos", "eos", "unknown", "padding")}
            backend = self._byte_pairs(self._pre()) if self._kind == _BYTE_PAIRS else self._pieces(named["unknown"])
            self._add_special(backend, {*named.values()})
        except DataError:
            raise
        except Exception as error:  # the library's own type, of a list that contradicts another
            self._refuse(str(error))
        kind: Any = PreTrainedTokenizerFast  # transformers does not type it
        fast_tokenizer: PreTrainedTokenizerFast = kind(
            tokenizer_object=backend,
            clean_up_tokenization_spaces=False,
            bos_token=named["bos"],
            eos_token=named["eos"],
            unk_token=named["unknown"],
            pad_token=named["padding"],
            add_bos_token=named["bos"] is not None and self._adds("bos", self._begins()),
            add_eos_token=named["eos"] is not None and self._adds("eos", False),
        )
        template = self._given.get("tokenizer.chat_template")
        fast_tokenizer.chat_template = template if isinstance(template, str) else None
        return fast_tokenizer

    def _pre(self) -> PreTokenizer:
        if not self._given.get("tokenizer.ggml.pre"):
            warnings.warn(
                f"{self._path.name} does not say how its text is cut before tokens are merged (tokenizer.ggml.pre), as "
                "old files do not; it is cut as llama.cpp does then, and the model may read other tokens than it has "
                "learned: take a newer conversion of it",
                UnnamedSplitWarning,
                stacklevel=2,
            )
        return PRE_TOKENIZERS[self._rule]

    def _byte_pairs(self, pre: PreTokenizer) -> Tokenizer:
        backend = Tokenizer(BPE(self._vocab, self._merges(), ignore_merges=pre.whole))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        return backend

    def _pieces(self, unknown: str | None) -> Tokenizer:
        """Return pieces in which a blank is a character, with bytes for unknown characters."""
        merges = self._merges() if self._kind == _GEMMA4 else [*self._halves()]
        backend = Tokenizer(BPE(self._vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        blank_first = self._kind == _PIECES and self._adds("space_prefix", not self._gemma)
        prepend = [normalizers.Prepend(_BLANK)] if blank_first else []
        backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _BLANK)])
        if self._kind == _GEMMA4:
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
        stripped = [decoders.Strip(" ", 1, 0)] if blank_first else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
        )
        return backend

    def _merges(self) -> list[tuple[str, str]]:
        """Return the merges of the file; tokens that are ends of lines are not split."""
        if _MERGES not in self._given:
            self._refuse("it lists no merges (tokenizer.ggml.merges)")
        merges = []
        for text in self._list(_MERGES, str):
            blank = text.find(" ", 1)
            merges.append((text[:blank], text[blank + 1 :]) if blank > 0 else ("", ""))
        if self._kind == _GEMMA4:
            lines = ["\n" * n for n in range(1, _LONGEST) if "\n" * n in self._vocab]
            merges = [*((first, "\n" * (len(second) - len(first))) for first, second in pairwise(lines)), *merges]
        if any(half not in self._vocab for pair in merges for half in pair):
            self._refuse("one of its merges is of texts that are no tokens")
        return merges

    def _halves(self) -> Iterator[tuple[str, str]]:
        """Return all pairs of tokens that make a token, those of the highest score first."""
        scores = self._list(_SCORES, float)
        if len(scores) != len(self._tokens):
            self._refuse(f"it has {len(self._tokens):,} tokens and the scores of {len(scores):,}")
        for i in sorted(range(len(scores)), key=lambda i: -scores[i]):
            token = self._tokens[i]
            for cut in range(1, len(token)):
                if token[:cut] in self._vocab and token[cut:] in self._vocab:
                    yield token[:cut], token[cut:]

    def _add_special(self, backend: Tokenizer, named: set[str | None]) -> None:
        """Add the tokens that are searched in a text before it is cut, the longest first.

        Args:
            backend: Tokenizer to add them to.
            named: Tokens that begin or end a text, pad it, or stand for the unknown: special, whatever their type.
        """
        called = str(self._given.get("general.name")).lower()
        strips = self._kind == _PIECES and ("phi-3" in called or "phi3" in called)  # as llama.cpp knows them
        kept_tokens = {"<unk>", "<s>", "<|endoftext|>"}
        added = [
            (token, kind != _USER_DEFINED or token in named)
            for token, kind in zip(self._tokens, self._types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or token in named
        ]
        for special, add in ((True, backend.add_special_tokens), (False, backend.add_tokens)):
            add(
                [
                    AddedToken(token, normalized=False, special=special, rstrip=strips and token not in kept_tokens)
                    for token, is_special in added
                    if is_special is special
                ]
            )

    def _named(self, name: str) -> str | None:
        """Return the text of a special token, or None if the file has none."""
        usual = _USUAL.get(name) if self._kind == _PIECES else None
        token_id = self._given.get(f"tokenizer.ggml.{name}_token_id", usual)
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self._tokens):
            self._refuse(f"its special token {name!r} has the id {token_id!r}, and it has {len(self._tokens):,} tokens")
        return self._tokens[token_id]

    def _adds(self, name: str, usual: bool) -> bool:
        key = f"tokenizer.ggml.add_{name}" + ("" if name == "space_prefix" else "_token")
        return bool(self._given.get(key, usual))

    def _begins(self) -> bool:
        return self._kind == _PIECES if self._kind != _BYTE_PAIRS else PRE_TOKENIZERS[self._rule].begins

    def _list(self, key: str, kind: type) -> list[Any]:
        entries = self._given.get(key)
        kinds = (float, int) if kind is float else kind
        if not isinstance(entries, list) or not all(isinstance(value, kinds) for value in entries):
            self._refuse(f"{key} is no list of the type {kind.__name__}")
        return entries

    def _refuse(self, why: str) -> NoReturn:
        raise DataError(f"{self._path.name}: the tokenizer is damaged ({why}); fetch the file again, or {_WAY_OUT}")
