"""Rules that cut text before byte pairs are merged, by the names that GGUF files give them.

The names, and the meaning of each, are llama.cpp's. Where its expressions replace those of the original tokenizer
because its library of expressions knows no letters by case and no marks, the original's are used: the vocabulary was
learned with them.
"""

from __future__ import annotations

from typing import NamedTuple

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
