"""How many tokens of reused chunks are computed again."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.variant import ids_key
from tests.helpers.engine.chunked import LEAD, PROMPTS, QUESTION, A, B, ask, engine

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")


def test_recompute_0_computes_what_is_no_chunk_alone() -> None:
    of = engine()
    for name in ("ab", "cba"):
        ask(of, PROMPTS[name])
    before = of.stats()
    kv = ask(of, PROMPTS["ba"], recompute=0).completions[0].kv
    after = of.stats()
    assert (kv.reused_tokens, kv.recomputed_tokens) == (len(A) + len(B), 0)
    assert after.prompt_tokens - before.prompt_tokens == len(LEAD) + len(QUESTION)
    assert after.reused_tokens - before.reused_tokens == len(A) + len(B)
    kv = ask(of, PROMPTS["ba"], recompute=0.25).completions[0].kv
    assert kv.recomputed_tokens == 6 + 5  # a quarter of 23 and of 17, rounded up
    of.close()


def test_the_first_token_of_a_prompt_comes_from_a_beginning() -> None:
    of = engine()
    ask(of, PROMPTS["ab"])  # which stores A after another text
    kv = ask(of, PROMPTS["a"], recompute=0).completions[0].kv
    assert (kv.reused_tokens, kv.recomputed_tokens, kv.exact) == (len(A) - 1, 1, False)
    of.close()


def test_auto_computes_what_the_context_asks_for() -> None:
    of = engine(store=ChunkStore(None, alpha=1.0))
    for name in ("ab", "cba"):
        ask(of, PROMPTS[name])
    store = of.config.chunk_store
    expected, before = 0, [ids_key(LEAD)]
    for ids in (B, A):
        shares = [facts.share(ids_key(()), before, 1.0) for facts in store.find(ids_key(ids))]
        expected += int(np.ceil(min(shares) * len(ids)))
        before.append(ids_key(ids))
    found = ask(of, PROMPTS["ba"]).completions[0].kv
    assert 0 < found.recomputed_tokens == expected < len(A) + len(B)
    of.close()


def test_a_chunk_twice_in_a_prompt_is_stored_once() -> None:
    of = engine()
    ask(of, PROMPTS["aa"])
    assert of.stats().chunks is not None
    assert of.stats().chunks.stored == 1
    assert ask(of, PROMPTS["aa"], recompute=0).completions[0].kv.reused_tokens == 2 * len(A)
    of.close()
