"""Approximate pages of chunks reach no plain prompt: the prefix tree and salts."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.cache.chunks.store import ChunkStore
from millpond.engine.request import CacheOptions, Request
from tests.helpers.engine.chunked import PROMPTS, A, ask, close, engine, ids_of
from tests.helpers.engine.helpers import add, greedy

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")


def test_no_page_of_a_reused_chunk_enters_the_prefix_tree() -> None:
    mixed = engine(prefix_cache=True)
    for name in ("ab", "cba", "ba", "aa", "ab"):
        for recompute in ("auto", 0, 0.5, 1):
            ask(mixed, PROMPTS[name], recompute=recompute)
    fresh = engine()
    for name, asked in PROMPTS.items():
        found = ask(mixed, ids_of(asked))
        assert close(found, ask(fresh, ids_of(asked))), name
    assert found.completions[0].kv.shared_tokens > 0, "the tree takes part"
    for of in (mixed, fresh):
        of.close()


def test_the_integrity_check_finds_a_tainted_page_in_the_tree() -> None:
    of = engine(prefix_cache=True, max_step_tokens=64)
    ask(of, PROMPTS["ab"])
    of._parts.prefix_cache.tree.clear()
    add(of, Request(request_id="x", prompt=PROMPTS["ba"], params=greedy(8), cache=CacheOptions(recompute=0)))
    of.step()
    of.check_integrity()
    state = of._requests["x"]
    assert state.tainted
    tables = [layer_cache.table for layer_cache in state.group.batch_cache.layers]
    of._parts.prefix_cache.tree.keep("wrong", state.ids_array, tables)
    with pytest.raises(AssertionError, match="an approximate page in the prefix tree"):
        of.check_integrity()
    of._parts.prefix_cache.tree.clear()
    of.close()


def test_salts_keep_chunks_apart_and_share_what_has_none(tmp_path: Path) -> None:
    of = engine(store=ChunkStore(tmp_path))
    for salt, expected in (("one", 0), ("two", 0), ("one", len(A)), (None, 0), ("three", len(A))):
        add(of, Request(request_id="x", prompt=PROMPTS["a"], params=greedy(1), cache_salt=salt))
        (output,) = of.drain()
        assert output.completions[0].kv.reused_tokens == expected
        assert len([*tmp_path.glob("??/*/*")]) == (salt in (None, "three")), "salted chunks stay in memory"
    of.close()
