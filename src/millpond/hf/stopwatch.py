"""Stopwatch for unmodified generate(): a streamer that records the time of each token."""

from __future__ import annotations

import statistics
import time
from typing import Any

from transformers.generation.streamers import BaseStreamer


class Stopwatch(BaseStreamer):
    """Streamer that records the time of each token, for any batch size.

    The prompt comes first, then one call per decoding step.
    """

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.ticks: list[float] = []
        self._saw_prompt = False

    def put(self, value: Any) -> None:
        """Record the time of a token; the prompt is not recorded."""
        if self._saw_prompt:
            self.ticks.append(time.perf_counter())
        self._saw_prompt = True

    def end(self) -> None:
        """Do nothing: all times are recorded."""

    @property
    def prefill_s(self) -> float:
        """Seconds from the start to the first token."""
        return self.ticks[0] - self.begun if self.ticks else 0.0

    @property
    def steps(self) -> list[float]:
        """Seconds of each decoding step after the first token."""
        return [after - before for before, after in zip(self.ticks, self.ticks[1:], strict=False)]

    @property
    def decode_s(self) -> float:
        """Median seconds of a decoding step; 0.0 without steps."""
        return statistics.median(self.steps) if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second and sequence, over all steps; 0.0 without steps."""
        total = sum(self.steps)
        return len(self.steps) / total if total else 0.0
