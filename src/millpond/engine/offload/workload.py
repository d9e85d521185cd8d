"""Workload that a plan is made for: tokens of a prompt and of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millpond.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tokens of each prompt and each answer.

    Raises:
        OptionError: a number that is not whole, or below 1.
    """

    prompt: int = 512
    new: int = 128

    def __post_init__(self) -> None:
        for name, value in (("prompt_tokens", self.prompt), ("new_tokens", self.new)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name}={value!r} must be a whole number of at least 1")

    def check_context(self, context: int | None) -> None:
        """
        Raises:
            OptionError: more tokens than the model's context; None: any.
        """
        if context is not None and self.prompt + self.new > context:
            raise OptionError(
                f"prompt_tokens={self.prompt} and new_tokens={self.new} are more than the model's context of "
                f"{context} tokens; shorten one of them"
            )

    def __str__(self) -> str:
        return f"{self.prompt} + {self.new} tokens"


def usual(context: int | None) -> Iterator[Workload]:
    """What is planned for where nothing is said: 512 + 128 tokens, then shorter texts, down to 96 + 32.

    Example:
        >>> [str(one) for one in usual(400)]
        ['256 + 64 tokens', '128 + 32 tokens', '96 + 32 tokens']
    """
    for prompt, new in ((512, 128), (256, 64), (128, 32), (96, 32)):
        if context is None or prompt + new <= context or (prompt, new) == (96, 32):
            yield Workload(prompt=prompt, new=new)
