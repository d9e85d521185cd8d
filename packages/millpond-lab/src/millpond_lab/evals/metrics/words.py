"""Text cut into the units that are compared."""

from __future__ import annotations

import re
import string
import unicodedata

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_UNITS = re.compile(r"[a-z0-9]+")
#: Han characters one by one, everything else in runs.
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|[^\W\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+")


def normal(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces, as question answering is scored since SQuAD.

    Example:
        >>> normal("The Mill,  a pond!")
        'mill pond'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def units(text: str) -> list[str]:
    """Lower-case runs of ASCII letters and digits: what ROUGE counts (Lin, 2004; no stemming).

    Example:
        >>> units("Two ponds, 1 mill-wheel.")
        ['two', 'ponds', '1', 'mill', 'wheel']
    """
    return _UNITS.findall(text.lower())


def units_zh(text: str) -> list[str]:
    """Chinese text by characters, runs of other letters and digits as they are; punctuation is left out.

    Example:
        >>> units_zh("磨坊，2024年 GDP。")
        ['磨', '坊', '2024', '年', 'gdp']
    """
    return _HAN.findall(unicodedata.normalize("NFKC", text).lower())
