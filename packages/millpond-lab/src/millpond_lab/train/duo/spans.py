"""Texts of random tokens with spans that are said again, for any model: what heads that look far can find."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from millpond.errors import OptionError
from millpond_lab.pond.text import stream
from millpond_lab.train.retain.texts import Asked

#: The name of these texts as data.
SPANS = "spans"
#: Spans of a text that are said again, and tokens of one: at least, at most.
SAID_AGAIN, SPAN_TOKENS = 4, (12, 32)


class RepeatedSpans:
    """Random tokens of a vocabulary, and behind them some spans of theirs once more.

    Args:
        vocabulary: tokens of the model. without: ids that are not drawn, such as those of the end of a text.
        shortest, longest: tokens before the spans.

    Raises:
        OptionError: texts too short for a span.
    """

    name = "spans of random tokens, said again"

    def __init__(self, vocabulary: int, without: Iterable[int] = (), shortest: int = 256, longest: int = 1024) -> None:
        if shortest < 2 * SPAN_TOKENS[1] or longest < shortest:
            raise OptionError(
                f"lengths {shortest} to {longest}: spans of up to {SPAN_TOKENS[1]} tokens need texts of at least "
                f"{2 * SPAN_TOKENS[1]}, the shortest first"
            )
        left_out = set(without)
        self._ids = np.array([i for i in range(vocabulary) if i not in left_out])
        self._lengths = shortest, longest

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        """The text of one step of the stream `stream_name`."""
        rng = stream("spans", stream_name, seed, step)
        shortest, longest = self._lengths
        text = rng.choice(self._ids, int(rng.integers(shortest, longest + 1)))
        parts = [text]
        for _ in range(SAID_AGAIN):
            n = int(rng.integers(SPAN_TOKENS[0], SPAN_TOKENS[1] + 1))
            begin = int(rng.integers(len(text) - n + 1))
            parts.append(text[begin : begin + n])
        return Asked(torch.from_numpy(np.concatenate(parts)).long(), len(text))
