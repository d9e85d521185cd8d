"""One step of the model, for groups that decode and prompts that are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millpond.cache.batch_cache import BatchCache
from millpond.cache.layer.prompt_pass import PartialSpan
from millpond.engine.decode_group import DecodeGroup
from millpond.runner.packed_cache import Segment
from millpond.runner.packed_model import PackedModel


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Some tokens of a prompt.

    Attributes:
        stack: its cache. ids: (n,) int64, the tokens. start: place of the first in the prompt.
        span: of a prompt with chunks, which of these tokens are computed; None: all.
        every_row: the logits of all tokens are needed; else of none, or of the last where it `ends` the prompt.
    """

    stack: BatchCache
    ids: np.ndarray
    start: int
    ends: bool
    every_row: bool
    span: PartialSpan | None = None

    @property
    def computed(self) -> np.ndarray:
        """(R,) int64: which of the tokens are computed."""
        return np.arange(len(self.ids)) if self.span is None else self.span.rows.numpy()

    @property
    def rows(self) -> range:
        """Rows of its own whose logits are needed."""
        n = len(self.computed)
        return range(0 if self.every_row else n - 1 if self.ends else n, n)


def run(model: PackedModel, groups: Sequence[DecodeGroup], readings: Sequence[PromptSegment]) -> list[Tensor]:
    """One forward pass.

    Returns:
        Logits (n, vocabulary) per group, one row per answer, then per reading those that it needs.
    """
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[Segment] = []
    asked: list[np.ndarray] = []
    begin = 0

    def put(
        stack: BatchCache, tokens: np.ndarray, places: np.ndarray, rows: range, span: PartialSpan | None, decoding: bool
    ) -> None:
        nonlocal begin
        segments.append(Segment(stack.layers, begin, begin + len(tokens), decoding, stack.states, stack, span))
        ids.append(tokens)
        positions.append(places)
        asked.append(begin + np.arange(rows.start, rows.stop))
        begin += len(tokens)

    for group in groups:
        if group.recipe.reach is not None:
            group.close_gaps(group.recipe.reach)
        newest = np.array([answer.newest for answer in group.answers], dtype=np.int64)
        group.stack.begin(torch.from_numpy(newest[:, None]).to(model.device))
        put(group.stack, newest, group.stack.timeline.seen.astype(np.int64), range(len(newest)), None, True)
    for reading in readings:
        reading.stack.begin(torch.from_numpy(reading.ids[None]).to(model.device))
        rows = reading.computed
        begin_at = reading.start - int(reading.stack.timeline.closed.sum())  # of its only sequence, if it has begun
        put(reading.stack, reading.ids[rows], begin_at + rows, reading.rows, reading.span, False)
    chosen = np.concatenate(asked)
    dummy = not len(chosen)  # a part of a prompt alone: the model still wants a row
    wanted = torch.from_numpy(np.array([begin - 1]) if dummy else chosen).to(model.device)
    logits = model.forward(
        torch.from_numpy(np.concatenate(ids)).to(model.device),
        torch.from_numpy(np.concatenate(positions)).to(model.device),
        segments,
        wanted,
    )
    ends = np.cumsum([len(needed) for needed in asked]).tolist()
    return [logits[end - len(needed) : end] for end, needed in zip(ends, asked, strict=True)]
