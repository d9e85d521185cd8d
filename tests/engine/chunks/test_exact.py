"""A prompt of chunks that is computed in full, and chunks stored after the same text, give the plain prompt."""

from __future__ import annotations

import pytest

import millpond as mp
from tests.helpers.engine.chunked import LEAD, PROMPTS, QUESTION, A, B, ask, chunked, close, engine, ids_of

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")


@pytest.mark.parametrize("name", PROMPTS)
def test_recompute_1_is_the_plain_prompt_at_any_order(name: str) -> None:
    of = engine()
    plain = ask(of, ids_of(PROMPTS[name]))
    for _ in range(2):  # with an empty store, and with one that knows the chunks
        found = ask(of, PROMPTS[name], recompute=1)
        assert close(found, plain)
        assert found.completions[0].kv.exact
        assert found.completions[0].kv.reused_tokens == 0
    ask(of, PROMPTS["ab"])
    assert close(ask(of, PROMPTS[name], recompute=1), plain)
    of.close()


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gpt_neox", "phi3", "gemma2", "gemma3", "mixtral", "gpt_oss"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_that_stores_its_chunks_and_one_that_repeats_it_are_exact(name: str) -> None:
    of = engine(name)
    plain = ask(of, ids_of(PROMPTS["ab"]), 4)
    stored = ask(of, PROMPTS["ab"], 4)
    assert stored.completions[0].kv.reused_tokens == 0
    again = ask(of, PROMPTS["ab"], 4)
    kv = again.completions[0].kv
    assert (kv.reused_tokens, kv.recomputed_tokens, kv.exact) == (len(A) + len(B), 0, True)
    assert close(stored, plain)
    assert close(again, plain)
    of.close()


def test_a_chunk_at_the_beginning_is_exact_wherever_it_was_stored_alone() -> None:
    of = engine()
    ask(of, PROMPTS["a"])
    longer = chunked(mp.Chunk(A), LEAD, QUESTION)
    found = ask(of, longer)
    kv = found.completions[0].kv
    assert (kv.reused_tokens, kv.recomputed_tokens, kv.exact) == (len(A), 0, True)
    assert close(found, ask(of, ids_of(longer)))
    moved = ask(of, PROMPTS["ba"], recompute=0).completions[0].kv
    assert (moved.reused_tokens, moved.exact) == (len(A), False)
    of.close()
