"""Protocol of token properties that a policy needs from a tokenizer before a cache uses it."""

from __future__ import annotations

from typing import Protocol

from millpond.policy.token_classes import TokenClasses


class TokenSource(Protocol):
    """What tokens are, and how a text is spelled."""

    def classes(self, given: TokenClasses) -> TokenClasses:
        """The classes, with those that are not given.

        Raises:
            OptionError: a class is not given and not known.
        """
        ...

    def spell(self, text: str) -> tuple[int, ...]:
        """The token ids of a text.

        Raises:
            OptionError: they are not known.
        """
        ...
