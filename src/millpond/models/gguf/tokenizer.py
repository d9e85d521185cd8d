"""Tokenizers of GGUF files, built from their vocabulary so that they give the ids that llama.cpp gives."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from millpond.errors import DataError, OptionError
from millpond.models.gguf.header import GGUFHeader, read_header

_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_ENDINGS = f"(?i:{_ENDINGS})"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_LINES = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"
#: Letters that may begin a word of which the rest is in small letters, and those of that rest; marks are in both.
_LARGE, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|{_SPACES}"
_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
_CHINESE_AND_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
#: Of falcon, and of files that name nothing: the signs that stand alone.
_SIGNS_ALONE = r"[\p{P}\$\+<=>\^~\|`]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
#: The letters of the first models of DeepSeek: Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee, and a few more.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_SIGNS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_OTHERS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _words(numbers: str, *, endings: str = f"{_ANY_ENDINGS}|", word: str = _WORD, lines: str = _LINES) -> str:
    """Return an expression for words with the sign before them, numbers, other signs, blanks.

    Other signs include the ends of lines after them.
    """
    return rf"{endings}{word}|{numbers}|{_SIGNS}[\r\n]*|{lines}|{_SPACES}"


def _cased(numbers: str, endings: str) -> str:
    """Return `_words`, where a word also ends before a capital letter after a small one."""
    sign = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{sign}{_LARGE}*{_SMALL}+{endings}|{sign}{_LARGE}+{_SMALL}*{endings}|{numbers}|{_SIGNS}[\r\n/]*|{_LINES}"
        rf"|{_SPACES}"
    )


def _marked(signs: str) -> str:
    """Return the expression of later DeepSeek models.

    A sign joins the Latin letters after it, and marks join their letters.
    """
    joined = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    return rf"{joined}| ?[\p{{P}}\p{{S}}]+{signs}|{_SPACES}"


class PreTokenizer(NamedTuple):
    """Rule that cuts text into the pieces within which tokens are merged.

    Attributes:
        splits: Regular expressions (Oniguruma), each applied to the pieces of those before it; both its matches and the
            text between are pieces.
        whole: A piece that is a token is taken as it is, whatever its merges would make of it.
        begins: The token of the beginning is added if the file does not say.
    """

    splits: tuple[str, ...]
    whole: bool = False
    begins: bool = False


_LLAMA3, _QWEN2 = _words(_DIGITS), _words(_DIGIT)
_NEW_DEEPSEEK = (_DIGITS, _CHINESE_AND_JAPANESE, _marked(rf"[\r\n]*|{_LINES}"))
_CASCADE = "|".join([*(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s{1}"])

_NAMES: tuple[tuple[str, PreTokenizer], ...] = (
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4", PreTokenizer((_GPT2,))),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreTokenizer((_DIGIT, _GPT2))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_LLAMA3,), whole=True, begins=True),
    ),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), whole=True)),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer((_QWEN2,))),
    (
        "qwen35",
        PreTokenizer(
            (
                rf"{_ANY_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
                rf"|{_LINES}|{_SPACES}",
            )
        ),
    ),
    ("tekken", PreTokenizer((_cased(_DIGIT, ""),), whole=True, begins=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_cased(_DIGITS, f"{_ANY_ENDINGS}?"),))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_NEW_DEEPSEEK)),
    (
        "deepseek-llm",
        PreTokenizer((r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_SIGNS, r"\s+$", _DEEPSEEK_OTHERS, r"\p{N}+")),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_OTHERS, _DIGIT))),
    ("spark2_5", PreTokenizer((_DIGITS, _CHINESE_AND_JAPANESE, _marked(r"|[\r\n]"), _DIGIT))),
    ("falcon", PreTokenizer((_SIGNS_ALONE, _GPT2, "[0-9][0-9][0-9]"))),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, _DIGIT))),
    ("jais-2", PreTokenizer((rf"{_ANY_ENDINGS}|{_WORD}|{_DIGITS}|{_SIGNS}[\r\n]*|{_LINES}|{_CASCADE}",))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_words(_DIGIT, lines=r"\s*[\r\n]"),))),
    ("seed-coder", PreTokenizer((rf"{_ANY_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_SPACES}",))),
    ("ufakzeka", PreTokenizer((_words(_DIGIT, endings=""),))),
    ("laguna", PreTokenizer((r"\n+", _QWEN2))),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_ANY_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                rf"|{_SIGNS}[\r\n/]?|\s*[\r\n]|{_SPACES}",
            )
        ),
    ),
    ("minicpm5", PreTokenizer((_DIGITS, _words(r"\p{N}+")), whole=True)),
    ("default", PreTokenizer((_SIGNS_ALONE.replace("`", ""), _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
)
#: By llama.cpp's name.
PRE_TOKENIZERS = {name: kind for names, kind in _NAMES for name in names.split()}


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
