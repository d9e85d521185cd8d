"""Methods, codecs, narrow numbers at rest and a small pool with prompts of reused chunks."""

from __future__ import annotations

import pytest

from millpond.cache.chunks.store import ChunkStore
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError
from tests.helpers.engine.chunked import PROMPTS, A, B, ask, close, engine, first_logprob, ids_of
from tests.helpers.engine.helpers import add, greedy
from tests.helpers.hf.families import family

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")


@pytest.mark.parametrize("method", ["full", "snapkv", "keydiff", "tova", "pyramidkv", "ada", "lagkv", "knorm"])
def test_methods_plan_a_prompt_of_reused_chunks(method: str) -> None:
    of = engine(method=method)
    plain = ask(of, ids_of(PROMPTS["ab"]))
    assert close(ask(of, PROMPTS["ab"]), plain)
    again = ask(of, PROMPTS["ab"])
    assert close(again, plain)
    assert again.completions[0].kv.reused_tokens > 0
    moved = ask(of, PROMPTS["ba"], recompute=0.3)
    assert moved.completions[0].kv.seen == 5 + 17 + 23 + 6 + 7
    of.close()


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_codecs_hold_a_prompt_of_reused_chunks(codec: str) -> None:
    model = family("llama").make(hidden_size=64)  # codes take heads of 16 numbers
    of = Engine(model, method="full", codec=codec, chunk_store=ChunkStore(None), max_step_tokens=16)
    plain = ask(of, ids_of(PROMPTS["ab"]))
    ask(of, PROMPTS["ab"])
    assert close(ask(of, PROMPTS["ab"]), plain, 1e-3)
    of.close()


@pytest.mark.parametrize("method", ["h2o", "streaming", "expected_attention"])
def test_methods_that_need_all_queries_are_refused_unless_all_is_computed(method: str) -> None:
    of = engine(method=method)
    with pytest.raises(OptionError, match=f"method '{method}' needs every query"):
        of.add(Request(request_id="x", prompt=PROMPTS["ab"], params=greedy(2)))
    assert close(ask(of, PROMPTS["ab"], recompute=1), ask(of, ids_of(PROMPTS["ab"])))
    of.close()


@pytest.mark.parametrize(("rest", "rounding"), [("bf16", 0.02), ("int8", 0.05), ("int4", 0.5)])
def test_narrow_numbers_at_rest_are_an_approximation_that_says_so(rest: str, rounding: float) -> None:
    of = engine(store=ChunkStore(None, dtype=rest), prefix_cache=True)
    plain = ask(of, ids_of(PROMPTS["ab"]), 1)
    stored = ask(of, PROMPTS["ab"], 1)
    assert stored.completions[0].kv.exact
    again = ask(of, PROMPTS["ab"], 1)
    kv = again.completions[0].kv
    assert (kv.reused_tokens, kv.recomputed_tokens, kv.exact) == (len(A) + len(B), 0, False)
    assert 0 < abs(first_logprob(again) - first_logprob(plain)) < rounding
    assert close(ask(of, PROMPTS["ab"], 1, recompute=1), plain)
    assert close(ask(of, ids_of(PROMPTS["ab"]), 1), plain), "plain prompts stay exact"
    of.close()


def test_too_little_room_changes_no_token() -> None:
    free = engine(max_step_tokens=8)
    names = ("ab", "ba", "cba", "a")
    for name in names:
        ask(free, PROMPTS[name])
    expected = {name: ask(free, PROMPTS[name], recompute=0.3) for name in names}
    small = engine(store=free.config.chunk_store, max_step_tokens=8, kv_memory="45kB", overcommit=3)
    add(
        small,
        *(
            Request(
                request_id=name, prompt=PROMPTS[name], params=greedy(8, logprobs=0), cache=CacheOptions(recompute=0.3)
            )
            for name in names
        ),
    )
    done = {}
    while small.busy:
        done |= {output.request_id: output for output in small.step() if output.finished}
        small.check_integrity()
    assert small.stats().preemptions > 0, "a limit that does not matter tests nothing"
    for name in names:
        assert close(done[name], expected[name], 1e-4)
    for of in (free, small):
        of.close()
