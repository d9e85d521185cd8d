"""One step of the model, for groups that decode and prompts that are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millpond.cache.batch_cache import BatchCache
from millpond.engine.decode_group import DecodeGroup
from millpond.runner.packed_cache import Segment
from millpond.runner.packed_model import PackedModel


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Some tokens of a prompt.

    Attributes:
        stack: its cache. ids: (n,) int64, the tokens. start: position of the first.
        every_row: the logits of all tokens are needed; else of none, or of the last where it `ends` the prompt.
    """

    stack: BatchCache
    ids: np.ndarray
    start: int
    ends: bool
    every_row: bool

    @property
    def rows(self) -> range:
        """Rows of its own whose logits are needed."""
        n = len(self.ids)
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

    def put(stack: BatchCache, tokens: np.ndarray, places: np.ndarray, rows: range, decoding: bool) -> None:
        nonlocal begin
        stack.begin(torch.from_numpy(tokens[:, None] if decoding else tokens[None]).to(model.device))
        segments.append(Segment(stack.layers, begin, begin + len(tokens), decoding, stack.states, stack))
        ids.append(tokens)
        positions.append(places)
        asked.append(begin + np.arange(rows.start, rows.stop))
        begin += len(tokens)

    for group in groups:
        newest = np.array([answer.tokens[-1] for answer in group.answers], dtype=np.int64)
        put(group.stack, newest, group.stack.timeline.seen.astype(np.int64), range(len(newest)), True)
    for reading in readings:
        places = reading.start + np.arange(len(reading.ids))
        put(reading.stack, reading.ids, places, reading.rows, False)
    rows = np.concatenate(asked)
    dummy = not len(rows)  # a part of a prompt alone: the model still wants a row
    wanted = torch.from_numpy(np.array([begin - 1]) if dummy else rows).to(model.device)
    logits = model.forward(
        torch.from_numpy(np.concatenate(ids)).to(model.device),
        torch.from_numpy(np.concatenate(positions)).to(model.device),
        segments,
        wanted,
    )
    ends = np.cumsum([len(rows) for rows in asked]).tolist()
    return [logits[end - len(rows) : end] for end, rows in zip(ends, asked, strict=True)]
