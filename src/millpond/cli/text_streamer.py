"""Text on the screen while it is generated, with the times of its tokens."""

from __future__ import annotations

import sys
from typing import Any

from transformers import PreTrainedTokenizerBase

from millpond.engine.detokenizer import IncrementalDetokenizer
from millpond.hf.stopwatch import Stopwatch


class TextStopwatch(Stopwatch):
    """A stopwatch that also writes the new text to standard output, character by character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._pieces = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
        super().__init__()

    def put(self, value: Any) -> None:
        new = value.reshape(-1).tolist() if self._saw_prompt else []
        super().put(value)
        for token in new:
            self._write(self._pieces.add(token))

    def end(self) -> None:
        self._write(self._pieces.finish() + "\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
