"""Token properties that policies need, from a tokenizer of transformers: special tokens and punctuation."""

from __future__ import annotations

import unicodedata
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from millpond.errors import OptionError
from millpond.policy.token_classes import TokenClasses

_classes: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, TokenClasses]] = WeakKeyDictionary()


def fill_classes(classes: TokenClasses, tokenizer: PreTrainedTokenizerBase | None) -> TokenClasses:
    """Return the classes, completed from the tokenizer.

    Raises:
        OptionError: a class is not given, and there is no tokenizer.
    """
    if classes.known:
        return classes
    if tokenizer is None:
        raise OptionError(
            "this method keeps special tokens and punctuation, and knows them from a tokenizer: pass tokenizer= to "
            "compress, or the ids as its options, special='0;1' and punctuation='5;6'"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise OptionError(f"tokenizer={tokenizer!r} is not a transformers tokenizer")
    own_classes = token_classes(tokenizer)
    return TokenClasses(
        own_classes.special if classes.special is None else classes.special,
        own_classes.punctuation if classes.punctuation is None else classes.punctuation,
    )


def token_classes(tokenizer: PreTrainedTokenizerBase) -> TokenClasses:
    """Return the special tokens of a tokenizer, and the tokens that are punctuation alone.

    Chat marks are special tokens.
    """
    size = len(tokenizer)
    if tokenizer not in _classes or _classes[tokenizer][0] != size:
        special = {int(i) for i in tokenizer.all_special_ids}
        special |= {int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        marks = {
            int(i)
            for token, i in tokenizer.get_vocab().items()
            if not any(c.isascii() and c.isalnum() for c in token)  # most of a vocabulary, without decoding it
            and is_punctuation(str(tokenizer.decode([i])))
        }
        _classes[tokenizer] = (size, TokenClasses(frozenset(special), frozenset(marks - special)))
    return _classes[tokenizer][1]


def is_punctuation(text: str) -> bool:
    """Whether a text consists of punctuation marks, except for blanks around them.

    Example:
        >>> is_punctuation(" ?"), is_punctuation("a."), is_punctuation(" ")
        (True, False, False)
    """
    return bool(text.strip()) and all(unicodedata.category(c).startswith("P") for c in text.strip())


class TokenizerSource:
    """Source of token properties, see `millpond.policy.needs.TokenSource`.

    Args:
        tokenizer: Tokenizer of the model; None if there is none, and then nothing is known.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer

    def classes(self, given: TokenClasses) -> TokenClasses:
        return fill_classes(given, self._tokenizer)

    def spell(self, text: str) -> tuple[int, ...]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise OptionError(
                f"this method prompts with {text!r}, which a tokenizer spells: pass tokenizer= to compress, or "
                "token ids as its option, ask='5;6', or ask='none'"
            )
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise OptionError(f"tokenizer={tokenizer!r} is not a transformers tokenizer")
        return tuple(int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"])
