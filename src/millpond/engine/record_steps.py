"""Decoding steps that an engine records when it opens, so that no answer waits while kernels are compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch

from millpond.cache.batch_cache import BatchCache
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.engine.components import Components
from millpond.engine.device_memory import LEAST_SPARE
from millpond.engine.step_executor import PromptSegment, run
from millpond.kernels.cuda_graphs import roomy
from millpond.kernels.transfers import on_device
from millpond.runner.packed_cache import Segment
from millpond.runner.packed_model import PackedModel

_log = logging.getLogger(__name__)

#: Numbers of rows whose steps are recorded, at most.
MAX_SIZES = 8
#: Seconds after which no further number of rows begins.
MAX_SECONDS = 10.0
#: Bytes of what graphs read and return, at most: half of the least that stays free for them.
MAX_BYTES = LEAST_SPARE // 2
#: Tokens of the text whose next tokens are decoded, the second where a budget leaves no codes of the first.
LENGTHS = (160, 1280)
#: Steps within which one like another is recorded.
TRIED = 4


def record_steps(parts: Components) -> None:
    """Record the decoding steps of the default cache, by running some of dummy sequences.

    They have 1, 2, 4, 8, 16, 24, 32 and 48 rows, up to `max_running`, and page tables of the least width; for wider
    ones kernels are compiled then. Pages come from the engine's own pools, whose addresses graphs know, and are freed.
    An error is logged: the engine then records steps when they come. Where codes come with channels or factors of their
    own, a graph serves one batch alone, so that one is recorded, for its kernels.
    """
    graph = parts.model.decode_graph
    if graph is None:
        return
    began, rows = time.perf_counter(), 0
    text = parts.cache_factory.make_cache(LENGTHS[0])
    try:
        with parts.cache_factory.silent():
            _read(parts.model, text, LENGTHS[0])
            if _lacks_codes(text):
                text.clear()
                text = parts.cache_factory.make_cache(LENGTHS[1])
                _read(parts.model, text, LENGTHS[1])
            own = any(part.regions().knows_regions for part in _packed_parts(text))
            for n in islice(_sizes(parts.config.max_running), 1 if own else MAX_SIZES):
                nbytes = graph.nbytes * (rows + n) // max(rows, 1)
                if nbytes > MAX_BYTES or time.perf_counter() - began > MAX_SECONDS or not _record(parts, text, n):
                    break
                rows += n
    except Exception as error:
        _log.warning("decoding steps are recorded when they come: recording some at the start failed: %s", error)
    finally:
        text.clear()
        parts.trim()


def _sizes(max_running: int) -> Iterator[int]:
    """Yield numbers of sequences: the rows that graphs have, and as many as may run."""
    n = 0
    while n < max_running:
        n = min(roomy(n + 1), max_running)
        yield n


def _read(model: PackedModel, text: BatchCache, n: int) -> None:
    """Read a prompt of `n` tokens, or as many as leave room for steps in the model's context."""
    n = n if model.context_length is None else max(1, min(n, model.context_length - TRIED))
    run(model, [], [PromptSegment(text, np.zeros(n, dtype=np.int64), 0, True, False)])
    text.run_plans()


def _lacks_codes(text: BatchCache) -> bool:
    """Whether a longer text would have entries in codes, and this one has none.

    Steps over codes are others.
    """
    return any(not part.region_lengths.any() for part in _packed_parts(text))


def _packed_parts(text: BatchCache) -> list[QuantizedStore]:
    tables = [layer_cache.table for layer_cache in text.layers]
    return [part for table in tables if table is not None for part in table.packed_parts]


def _record(parts: Components, text: BatchCache, n: int) -> bool:
    """Decode `n` copies of a text until a step is recorded; return whether one was."""
    graph, batch_cache = parts.model.decode_graph, parts.cache_factory.make_cache()
    assert graph is not None, "the caller has looked"
    for layer_cache in batch_cache.layers:
        layer_cache.attention.shares_runs = False  # requests whose steps these are begin differently
    before = graph.recorded
    try:
        text.copy_to([0] * n, batch_cache)
        for _ in range(TRIED):
            _decode(parts.model, batch_cache)
            if graph.recorded > before:
                return True
        return False
    finally:
        batch_cache.clear()


def _decode(model: PackedModel, batch_cache: BatchCache) -> None:
    """Run one decoding step; what it says of next tokens is not needed."""
    n, ids = batch_cache.n_seq, torch.zeros(batch_cache.n_seq, dtype=torch.int64, device=model.device)
    batch_cache.begin(ids[:, None])
    positions = on_device(batch_cache.tracker.seen.astype(np.int64), model.device)
    segment = Segment(batch_cache.layers, 0, n, True, batch_cache.states, batch_cache)
    model.forward(ids, positions, [segment], torch.arange(n, device=model.device))
