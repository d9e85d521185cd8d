"""Recording a trace: unmodified generate(), looked at after the prompt and after each decoding step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from millpond.errors import OptionError
from millpond.hf.cache import MillpondCache
from millpond.inspector.token_text import Encoded, continuation
from millpond.inspector.trace import Change, HeadTrace, Trace, change_between, levels_of
from millpond.models.cache_argument import cache_argument

#: Bytes that the scores of a trace may take; beyond them only every second, fourth, ... step keeps its own.
SCORE_BYTES = 3 * 2**20

Floats = npt.NDArray[np.float32]
#: Scores of the entries held at one step, [layer][head], in the order of their positions.
Frame = list[list[Floats]]


@torch.inference_mode()
def record_trace(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: MillpondCache,
    prompt: Encoded,
    setting: dict[str, str],
    max_new_tokens: int = 64,
    score_bytes: int = SCORE_BYTES,
) -> Trace:
    """Continue `prompt` greedily with `cache` and record what the cache held on the way.

    Args:
        model: The decoder.
        tokenizer: Its tokenizer.
        cache: Fresh, made by `compress` for this model.
        prompt: See `encode_pieces`.
        setting: Settings of the run, for the reader of the trace.
        max_new_tokens: Tokens to generate at most; the last one is never read, so there is one step less.
        score_bytes: Most bytes of the scores; a longer trace records them at fewer steps, evenly.

    Raises:
        OptionError: nothing can be generated.
    """
    if max_new_tokens < 1:
        raise OptionError(f"max_new_tokens={max_new_tokens} must be at least 1")
    ids = torch.tensor([prompt.ids], device=model.device)
    recorder = Recorder(cache, score_bytes)
    generate: Any = model.generate
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **cache_argument(cache),
        streamer=recorder,
        do_sample=False,
        max_new_tokens=max_new_tokens,
    )
    tail = continuation(tokenizer, out[0].tolist(), len(prompt.ids))
    return recorder.trace(setting, prompt, tail)


class Recorder(BaseStreamer):
    """Pass it as `streamer`: it is called after each pass with the token that came of it."""

    def __init__(self, cache: MillpondCache, score_bytes: int = SCORE_BYTES) -> None:
        self._cache = cache
        self._limit = score_bytes
        self._first: list[list[list[int]]] = []
        self._held: list[list[list[int]]] = []
        self._changes: list[list[list[Change]]] = []
        self._frames: dict[int, Frame] = {}
        self._stride, self._stored = 1, 0
        self._bytes: list[tuple[int, int]] = []
        self._saw_prompt = False

    def put(self, value: Any) -> None:
        """Record the cache; the prompt itself comes first, before it is read."""
        if self._saw_prompt:
            self._look()
        self._saw_prompt = True

    def end(self) -> None:
        """Do nothing: a recorder needs no end."""

    def _look(self) -> None:
        step = len(self._bytes)
        held, frame = self._read()
        if step == 0:
            self._first = held
            self._changes = [[[] for _ in layer] for layer in held]
        else:
            for of_layer, before, after in zip(self._changes, self._held, held, strict=True):
                for of_head, old, new in zip(of_layer, before, after, strict=True):
                    of_head.append(change_between(old, new))
        self._held = held
        stats = self._cache.stats()
        self._bytes.append((stats.kv_bytes, stats.full_kv_bytes))
        if step % self._stride == 0:
            self._keep(step, frame)

    def _read(self) -> tuple[list[list[list[int]]], Frame]:
        held: list[list[list[int]]] = []
        frame: Frame = []
        for layer_cache in self._cache.layer_caches:
            dense = layer_cache.read(0)
            positions, scores = dense.positions.cpu().numpy(), dense.scores.float().cpu().numpy()
            held.append([row[row >= 0].tolist() for row in positions])
            frame.append([of[row >= 0].copy() for row, of in zip(positions, scores, strict=True)])
        return held, frame

    def _keep(self, step: int, frame: Frame) -> None:
        """Store a frame; if that is too much, drop every second one."""
        self._frames[step] = frame
        self._stored += _entries(frame)
        while self._stored > self._limit and len(self._frames) > 1:
            self._stride *= 2
            self._frames = {s: f for s, f in self._frames.items() if s % self._stride == 0}
            self._stored = sum(map(_entries, self._frames.values()))

    def trace(self, setting: dict[str, str], prompt: Encoded, tail: list[str]) -> Trace:
        """Return the recorded trace with its text."""
        heads = tuple(
            tuple(self._head(layer, head) for head in range(len(row))) for layer, row in enumerate(self._first)
        )
        return Trace(
            setting,
            (*prompt.pieces, *tail),
            len(prompt.ids),
            heads,
            tuple(self._frames),
            tuple(held for held, _ in self._bytes),
            tuple(full for _, full in self._bytes),
            prompt.special,
        )

    def _head(self, layer: int, head: int) -> HeadTrace:
        rows = [frame[layer][head].astype(np.float64) for frame in self._frames.values()]
        scores = np.concatenate(rows)
        positive = scores[scores > 0]
        low, high = (float(positive.min()), float(positive.max())) if len(positive) else (0.0, 0.0)
        levels = tuple(levels_of(row, low, high).tobytes() for row in rows) if len(positive) else ()
        return HeadTrace(tuple(self._first[layer][head]), tuple(self._changes[layer][head]), low, high, levels)


def _entries(frame: Frame) -> int:
    return sum(len(scores) for layer in frame for scores in layer)
