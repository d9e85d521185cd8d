"""Token properties that policies need, from a tokenizer of transformers."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from millpond.errors import OptionError
from millpond.hf.token_classes import fill_classes
from millpond.policy.token_classes import TokenClasses


class TokenizerSource:
    """See `millpond.policy.needs.TokenSource`.

    Args:
        tokenizer: None where there is none; then nothing is known.
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
