"""Text on the screen while it is generated, with the times of its tokens."""

from __future__ import annotations

import sys
from typing import Any

from transformers import PreTrainedTokenizerBase, TextStreamer

from millpond.bench.common.stopwatch import Stopwatch


class TextStopwatch(Stopwatch):
    """A stopwatch that also writes the new text to standard output, word by word."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._writer: Any = _Writer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        super().__init__()

    def put(self, value: Any) -> None:
        super().put(value)
        self._writer.put(value)

    def end(self) -> None:
        self._writer.end()


class _Writer(TextStreamer):
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        sys.stdout.write(text + ("\n" if stream_end else ""))
        sys.stdout.flush()
