"""One request of a load, before it is sent."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenBlocks:
    """A prompt of made-up tokens, block by block: equal names are equal tokens, so prompts share what traces share.

    Attributes:
        parts: (name, tokens) of each block, in order; no name below 0.
    """

    parts: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """In tokens."""
        return sum(size for _, size in self.parts)

    def tokens(self, vocab_size: int, seed: int) -> list[int]:
        """The token ids, evenly drawn from 0 to vocab_size - 1; the same for the same names and seed.

        Example:
            >>> a, b = TokenBlocks(((1, 4), (2, 3))).tokens(100, 0), TokenBlocks(((1, 4), (3, 3))).tokens(100, 0)
            >>> len(a), a[:4] == b[:4], a[4:] == b[4:]
            (7, True, False)
        """
        drawn = [np.random.default_rng((seed, name)).integers(vocab_size, size=size) for name, size in self.parts]
        tokens: list[int] = np.concatenate(drawn).tolist()
        return tokens

    def shrunk(self, times: int) -> TokenBlocks:
        """As many times shorter, with the same names: what was shared still is."""
        return TokenBlocks(tuple((name, -(-size // times)) for name, size in self.parts))


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request.

    Attributes:
        at_s: when the trace sent it, in seconds from its first one.
        prompt: a text, or made-up tokens. output_tokens: how many the answer has.
        session: asks of one session follow each other; None: it stands alone.
    """

    at_s: float
    prompt: str | TokenBlocks
    output_tokens: int
    session: str | None = None

    def shrunk(self, times: int) -> LoadRequest:
        """With prompt and answer as many times shorter; a text stays as it is."""
        prompt = self.prompt if isinstance(self.prompt, str) else self.prompt.shrunk(times)
        return replace(self, prompt=prompt, output_tokens=-(-self.output_tokens // times))
