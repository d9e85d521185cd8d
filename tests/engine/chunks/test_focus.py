"""Focus: tokens of chunks that the question does not attend to are left out of deeper layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.cache.chunks.store import ChunkStore
from millpond.engine.chunks.focus import Focus
from millpond.engine.chunks.prompt import PromptSpan
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError, UnsupportedModelError
from tests.helpers.engine.chunked import QUESTION, A, B, C, ask, chunked, close, engine
from tests.helpers.engine.helpers import add, greedy, prompt, tokens
from tests.helpers.hf.families import family

#: Three chunks in an order in which none was stored.
ASKED = chunked(mp.Chunk(C), mp.Chunk(A), mp.Chunk(B), QUESTION)
CHUNKS = (A, B, C)


@cache
def five_layers() -> Any:
    return family("llama").make(num_hidden_layers=5)


def stored(**options: Any) -> Any:
    """An engine of five layers whose store has all chunks, each behind another text."""
    store = ChunkStore(None, **({"alpha": 1.0, "keep_above": 1} | options))
    of = Engine(five_layers(), method="full", chunk_store=store, page_slots=4, max_step_tokens=256)
    for chunk in CHUNKS:
        ask(of, chunked(prompt(9), mp.Chunk(chunk), QUESTION), new=1)
    return of


def focus(layers: int, coverage: float = 0.5) -> Focus:
    return Focus([(0, 4), (4, 8), (8, 12)], 12, layers, coverage)


def test_the_fewest_chunks_with_more_than_the_coverage() -> None:
    for coverage, expected in ((0.5, {1}), (0.6, {1, 2}), (0.85, {1, 2}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2})):
        found = focus(1, coverage)
        found.add(torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64))
        assert found.chosen == expected
    assert found.leaves_out(4) is False
    assert [focus(1).leaves_out(begin) for begin in (0, 4, 8)] == [True] * 3


def test_it_is_stable_after_as_many_equal_layers() -> None:
    found = focus(2)
    stable = []
    for masses in ([0.9, 0.1, 0.0], [0.0, 1.9, 0.1], [0.1, 0.8, 0.1], [0.3, 0.4, 0.3], [0.0, 9.0, 0.0]):
        found.add(torch.tensor(masses, dtype=torch.float64))
        stable.append(found.is_stable)
    assert found.chosen == {1}, "the sums over layers count, not the last one"
    assert stable == [False, False, False, True, True]


def test_never_stable_gives_the_bits_of_no_focus() -> None:
    plain, never = stored(), stored(focus=99)
    one, other = ask(plain, ASKED), ask(never, ASKED)
    assert tokens(one) == tokens(other)
    assert [a.logprob for a in one.completions[0].logprobs] == [b.logprob for b in other.completions[0].logprobs]
    assert never.stats().chunks.left_out == 0
    for each in (plain, never):
        each.close()


def test_full_coverage_leaves_nothing_out() -> None:
    of = stored(focus=1, coverage=1.0)
    ask(of, ASKED)
    assert of.stats().chunks.left_out == 0
    of.close()


def test_rows_of_chunks_out_of_focus_end_early() -> None:
    plain, early = stored(), stored(focus=1)
    one, other = ask(plain, ASKED), ask(early, ASKED)
    kv, left_out = other.completions[0].kv, early.stats().chunks.left_out
    n_layers = len(early._model.layers)
    assert 0 < left_out <= kv.recomputed_tokens * (n_layers - 2), "from the third layer on at the earliest"
    assert kv.recomputed_tokens == one.completions[0].kv.recomputed_tokens
    assert not close(one, other, 1e-7), "deeper layers read what the store has"
    for each in (plain, early):
        each.close()


def test_which_rows_go_on() -> None:
    of = stored(focus=1, coverage=1e-9)
    reuse = of._parts.chunk_reuse
    n = len(C) + len(A) + len(QUESTION)
    blend = reuse.begin(
        torch.tensor([*C, *A, *QUESTION]).numpy(),
        [PromptSpan(0, len(C), True), PromptSpan(len(C), len(C) + len(A), True), PromptSpan(len(C) + len(A), n, False)],
        CacheOptions(),
        1,
        None,
    )
    span = blend.span(0, n)
    assert span is not None
    assert span.focus is not None
    for _ in range(2):
        span.focus.add(torch.tensor([0.0, 1.0], dtype=torch.float64))
    narrowed = span.narrow(1)
    assert narrowed is not None
    deeper, stay = narrowed
    rows = deeper.rows.tolist()
    assert [row for row in rows if 0 < row < len(C)] == [], "the first chunk is out of focus"
    assert rows[0] == 0, "all tokens attend to the first one"
    assert span.rows[stay].tolist() == rows
    assert set(range(len(C) + len(A), len(blend.computed))) <= set(rows), "the question goes on"
    assert deeper.narrow(2) is None, "once"
    blend.release()
    of.close()


def test_prompts_in_one_pass_have_a_focus_each() -> None:
    """As alone, whatever else is in the pass."""
    others = [ASKED, chunked(mp.Chunk(B), mp.Chunk(C), QUESTION), QUESTION + A + B]
    alone = []
    for asked in others:
        of = stored(focus=1)
        alone.append(tokens(ask(of, asked)))
        of.close()
    of = stored(focus=1)
    for n, asked in enumerate(others):
        add(of, Request(request_id=f"r{n}", prompt=asked, params=greedy(8, logprobs=0)))
    done = {}
    while of.busy:
        done |= {out.request_id: out for out in of.step() if out.finished}
        of.check_integrity()
    assert [tokens(done[f"r{n}"]) for n in range(len(others))] == alone
    assert of.stats().chunks.left_out > 0
    of.close()


def test_a_chunk_that_ends_early_is_no_variant() -> None:
    def n_variants(**options: Any) -> int:
        of = stored(alpha=0.5, keep_above=0.05, **options)
        ask(of, ASKED)
        found: int = of.stats().chunks.stored
        of.close()
        return found

    assert n_variants() == 6
    assert 3 <= n_variants(focus=1, coverage=1e-9) < 6


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match="focus=-1 must be a number of layers"):
        ChunkStore(None, focus=-1)
    for coverage in (0, 1.5, float("nan")):
        with pytest.raises(OptionError, match=f"coverage={coverage} must be a share"):
            ChunkStore(None, coverage=coverage)
    with pytest.raises(UnsupportedModelError, match="takes a model that runs without its modules"):
        engine(store=ChunkStore(None, focus=2), runner="modules")
