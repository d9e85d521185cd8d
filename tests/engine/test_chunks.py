"""Prompts of chunks: against the plain prompt and a dense reference, and that exact prompts stay exact."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.cache.chunks.key import ids_key
from millpond.cache.chunks.store import ChunkStore
from millpond.engine.chunk_reuse import ChunkReuse, model_mark
from millpond.engine.chunked_prompt import PromptSpan
from millpond.engine.engine import Engine
from millpond.engine.model_step import PromptSegment, run
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError, UnsupportedModelError
from millpond.hf.model_profile import ModelProfile
from millpond.hf.signals.rotary import layer_rotations
from tests.helpers.engine.chunk_reference import Unrotated, blended
from tests.helpers.engine.helpers import METHODS, add, budget_of, greedy, prompt, tokens
from tests.helpers.hf.families import family, shared_model

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")

A, B, C = prompt(23), prompt(17), prompt(31)
LEAD, QUESTION = prompt(5), prompt(6)


def chunked(*parts: tuple[int, ...] | mp.Chunk) -> mp.Prompt:
    return mp.Prompt(list(parts))


PROMPTS = {
    "ab": chunked(LEAD, mp.Chunk(A), mp.Chunk(B), QUESTION),
    "ba": chunked(LEAD, mp.Chunk(B), mp.Chunk(A), QUESTION),
    "cba": chunked(mp.Chunk(C), mp.Chunk(B), LEAD, mp.Chunk(A), QUESTION),
    "a": chunked(mp.Chunk(A), QUESTION),
    "aa": chunked(mp.Chunk(A), mp.Chunk(A), QUESTION),
}


def ids_of(asked: mp.Prompt) -> tuple[int, ...]:
    return tuple(token for part in asked.parts for token in (part.content if isinstance(part, mp.Chunk) else part))  # type: ignore[misc]


def engine(name: str = "llama", method: str = "full", store: ChunkStore | None = None, **options: Any) -> Engine:
    chosen = {"max_step_tokens": 16, "page_slots": 4, "budget": budget_of(method), "options": METHODS[method]} | options
    return Engine(shared_model(name), method=method, chunk_store=store or ChunkStore(None), **chosen)


def ask(of: Engine, asked: mp.Prompt | tuple[int, ...], new: int = 8, **options: Any) -> Any:
    """The output of one request, with all pages checked after each step."""
    name = f"{len(ids_of(asked)) if isinstance(asked, mp.Prompt) else len(asked)}"
    cache = CacheOptions(**options)
    add(of, Request(request_id=name, prompt=asked, params=greedy(new, logprobs=0), cache=cache))
    done = []
    while of.busy:
        done += [output for output in of.step() if output.finished]
        of.check_integrity()
    (output,) = done
    assert output.error is None
    return output


def first_logprob(output: Any) -> float:
    return float(output.completions[0].logprobs[0].logprob)


def close(one: Any, other: Any, rounding: float = 1e-5) -> bool:
    alike = zip(one.completions[0].logprobs, other.completions[0].logprobs, strict=True)
    return tokens(one) == tokens(other) and all(abs(a.logprob - b.logprob) < rounding for a, b in alike)


# ---------------------------------------------------------------------- the plain prompt


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
    found = ask(of, PROMPTS["ba"]).completions[0].kv
    store = of.config.chunk_store
    expected, before = 0, [ids_key(LEAD)]
    for ids in (B, A):
        shares = [facts.share(ids_key(()), before, 1.0) for facts in store.find(ids_key(ids))]
        expected += int(np.ceil(min(shares) * len(ids)))
        before.append(ids_key(ids))
    assert 0 < found.recomputed_tokens == expected < len(A) + len(B)
    of.close()


def test_a_chunk_twice_in_a_prompt_is_stored_once() -> None:
    of = engine()
    ask(of, PROMPTS["aa"])
    assert of.stats().chunks is not None
    assert of.stats().chunks.stored == 1
    assert ask(of, PROMPTS["aa"], recompute=0).completions[0].kv.reused_tokens == 2 * len(A)
    of.close()


# ---------------------------------------------------------------------- the dense reference


class Blender:
    """Logits of all computed rows of a prompt, in one pass."""

    def __init__(self) -> None:
        self.model = shared_model("llama")
        self.engine = Engine(self.model, method="full", page_slots=4)
        self.reuse = ChunkReuse(ChunkStore(None), self.engine._model, model_mark(self.model, None))

    def __call__(self, parts: Sequence[tuple[int, ...]], **options: Any) -> tuple[Tensor, Tensor]:
        """(R, vocabulary) and the rows (R,); all parts but the last are chunks."""
        ends = np.cumsum([len(part) for part in parts]).tolist()
        spans = [
            PromptSpan(e - len(p), e, n < len(parts) - 1) for n, (p, e) in enumerate(zip(parts, ends, strict=True))
        ]
        ids = np.array([token for part in parts for token in part])
        blend = self.reuse.begin(ids, spans, CacheOptions(**options), 1, None)
        stack = self.engine._recipes.group(CacheOptions()).recipe.stack(len(ids))
        part = PromptSegment(stack, ids, 0, True, True, blend.span(0, len(ids)))
        with torch.no_grad():
            (logits,) = run(self.engine._model, [], [part])
        blend.finish()
        stack.clear()
        return logits, torch.from_numpy(np.flatnonzero(blend.computed))


@pytest.mark.parametrize("pick", ["random", "attention", "head", "deviation"])
def test_picked_rows_are_those_of_a_dense_reference(pick: str) -> None:
    blender = Blender()
    for part in (A, B, C):
        blender((part, QUESTION))
    logits, rows = blender((C, A, B, QUESTION), recompute=0.4, pick=pick)
    alone = [blended(blender.model, torch.tensor(part), torch.arange(len(part)))[1] for part in (C, A, B, QUESTION)]
    given = [
        Unrotated(torch.cat([one[layer].keys for one in alone], 1), torch.cat([one[layer].values for one in alone], 1))
        for layer in range(2)
    ]
    expected, _ = blended(blender.model, torch.tensor(C + A + B + QUESTION), rows, given)
    assert len(rows) == 0 + 10 + 7 + len(QUESTION)  # the first chunk is exact
    assert torch.allclose(logits, expected, atol=1e-5)
    whole, _ = blended(blender.model, torch.tensor(C + A + B + QUESTION), torch.arange(77))
    assert not torch.allclose(logits, whole[rows], atol=1e-3), "what is reused makes a difference here"
    blender.engine.close()


def test_a_later_token_never_changes_an_earlier_row() -> None:
    blender = Blender()
    for part in (A, B):
        blender((part, QUESTION))
    logits, rows = blender((B, A, QUESTION), recompute=0.5)
    for place in range(len(QUESTION)):
        changed = list(QUESTION)
        changed[place] = (changed[place] + 1) % 96
        other, same = blender((B, A, tuple(changed)), recompute=0.5)
        assert torch.equal(rows, same)
        n = len(rows) - len(QUESTION) + place
        assert torch.allclose(logits[:n], other[:n], atol=1e-6)
        assert not torch.allclose(logits[n], other[n], atol=1e-3)
    blender.engine.close()


def test_attention_to_earlier_parts_is_that_of_the_model() -> None:
    blender = Blender()
    blender((A, B, QUESTION))
    model = family("llama").make(attn_implementation="eager")
    model.load_state_dict(blender.model.state_dict())
    with torch.no_grad():
        found = model(torch.tensor([A + B + QUESTION]), output_attentions=True).attentions
    mean = torch.stack([layer[0].mean(0) for layer in found]).mean(0)
    rows = mean[len(A) : len(A) + len(B)]
    (facts,) = blender.reuse.store.find(ids_key(B))
    (received,) = facts.received
    assert received == pytest.approx(float(rows[:, 1 : len(A)].sum()), rel=1e-4)  # but for the first token
    a = received / (len(A) * len(B))
    b = float(rows[:, len(A) : len(A) + len(B)].sum()) / len(B) ** 2
    assert facts.impact == pytest.approx(1 / (1 + np.exp(-a / b)), rel=1e-4)
    assert torch.allclose(blender.reuse.store.take(facts, 1).scores, rows[:, 1 : len(A)].sum(1), atol=1e-5)
    blender.engine.close()


# ---------------------------------------------------------------------- RoPE

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"rope_type": "default", "rope_theta": 10000.0}),
    "llama3": (
        "llama",
        {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 1024},
    ),
    "yarn": (
        "llama",
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048},
    ),
    "partial": ("gpt_neox", {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_were_moved_agree_with_keys_computed_there(kind: str) -> None:
    name, parameters = KINDS[kind]
    model = family(name).make(rope_parameters=parameters, max_position_embeddings=16384)
    rotation = layer_rotations(ModelProfile.of(model))[0]
    assert rotation is not None
    torch.manual_seed(0)
    bare = torch.randn(1, 2, 24, 8)
    for begin in (0, 7, 500):
        old = rotation.rotate(bare, torch.arange(begin, begin + 24)[None])
        stored = rotation.rotate(old, torch.arange(begin, begin + 24)[None], inverse=True)
        for moved in (1, 3, 100, 2047, 8000):
            there = torch.arange(begin + moved, begin + moved + 24)[None]
            expected = rotation.rotate(bare, there)
            assert torch.allclose(rotation.rotate(stored, there), expected, atol=1e-4)
            assert not torch.allclose(old, expected, atol=1e-2)


def test_a_prompt_far_behind_is_that_of_the_dense_reference() -> None:
    """The same rotation in the model's own pass: a chunk after a thousand others."""
    model = family("llama").make(max_position_embeddings=16384)
    of = Engine(model, method="full", chunk_store=ChunkStore(None), page_slots=64, max_step_tokens=512)
    far = prompt(200) * 5
    ask(of, chunked(far, mp.Chunk(A), QUESTION), 4)
    again = ask(of, chunked(far, mp.Chunk(A), QUESTION), 4)
    assert again.completions[0].kv.reused_tokens == len(A)
    assert close(again, ask(of, far + A + QUESTION, 4))
    of.close()


# ---------------------------------------------------------------------- methods, codecs, limits


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
    add(small, *(
        Request(request_id=name, prompt=PROMPTS[name], params=greedy(8, logprobs=0), cache=CacheOptions(recompute=0.3))
        for name in names
    ))  # fmt: skip
    done = {}
    while small.busy:
        done |= {output.request_id: output for output in small.step() if output.finished}
        small.check_integrity()
    assert small.stats().preemptions > 0, "a limit that does not matter tests nothing"
    for name in names:
        assert close(done[name], expected[name], 1e-4)
    for of in (free, small):
        of.close()


# ---------------------------------------------------------------------- exact stays exact


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
    of._sharing.tree.clear()
    add(of, Request(request_id="x", prompt=PROMPTS["ba"], params=greedy(8), cache=CacheOptions(recompute=0)))
    of.step()
    of.check_integrity()
    live = of._live["x"]
    assert live.tainted
    tables = [core.table for core in live.group.stack.layers]
    of._sharing.tree.keep("wrong", live.numbers, tables)
    with pytest.raises(AssertionError, match="an approximate page in the prefix tree"):
        of.check_integrity()
    of._sharing.tree.clear()
    of.close()


def test_salts_keep_chunks_apart_and_share_what_has_none(tmp_path: Path) -> None:
    of = engine(store=ChunkStore(tmp_path))
    for salt, expected in (("one", 0), ("two", 0), ("one", len(A)), (None, 0), ("three", len(A))):
        add(of, Request(request_id="x", prompt=PROMPTS["a"], params=greedy(1), cache_salt=salt))
        (output,) = of.drain()
        assert output.completions[0].kv.reused_tokens == expected
        assert len([*tmp_path.glob("??/*/*")]) == (salt in (None, "three")), "salted chunks stay in memory"
    of.close()


# ---------------------------------------------------------------------- files


def test_broken_files_give_no_wrong_token_and_fail_no_request(tmp_path: Path) -> None:
    def opened() -> Engine:
        return engine(store=ChunkStore(tmp_path / "chunks", memory=1))

    of = opened()
    plain = ask(of, PROMPTS["ab"])
    of.close()
    of = opened()
    again = ask(of, PROMPTS["ab"])
    assert again.completions[0].kv.reused_tokens == len(A) + len(B)
    assert close(again, plain)
    for path in (tmp_path / "chunks").glob("??/*/*"):
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
    broken = ask(of, PROMPTS["ab"])
    assert close(broken, plain)
    assert broken.completions[0].kv.reused_tokens == 0
    assert of.stats().chunks is not None
    assert of.stats().chunks.torn == 2
    shutil.rmtree(tmp_path / "chunks")
    assert close(ask(of, PROMPTS["ab"]), plain)
    of.close()


def test_a_folder_is_of_one_model(tmp_path: Path) -> None:
    engine(store=ChunkStore(tmp_path)).close()
    with pytest.raises(OptionError, match="holds chunks of another model"):
        engine("qwen3", store=ChunkStore(tmp_path))
    changed = family("llama").make()
    with torch.no_grad():
        next(changed.parameters())[0, 0] += 1
    with pytest.raises(OptionError, match="holds chunks of another model"):
        Engine(changed, method="full", chunk_store=ChunkStore(tmp_path))


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [({"recompute": 1.5}, "recompute=1.5 must be"), ({"pick": "heads"}, "unknown pick 'heads'; did you mean 'head'")],
)
def test_options_out_of_range(options: dict[str, Any], words: str) -> None:
    of = engine()
    with pytest.raises(OptionError, match=words):
        of.add(Request(request_id="x", prompt=PROMPTS["ab"], cache=CacheOptions(**options)))
    of.close()


def test_chunks_without_a_store() -> None:
    of = Engine(shared_model("llama"), method="full")
    with pytest.raises(OptionError, match="the engine has no chunk store"):
        of.add(Request(request_id="x", prompt=PROMPTS["ab"]))
    assert len(ask(of, chunked(A, QUESTION)).prompt_token_ids) == len(A) + len(QUESTION), "no chunk, no store"
    of.close()


def test_log_probabilities_of_a_prompt_need_all_of_it() -> None:
    of = engine()
    with pytest.raises(OptionError, match="prompt_logprobs need every token"):
        of.add(Request(request_id="x", prompt=PROMPTS["ab"], params=greedy(2, prompt_logprobs=0)))
    of.close()


def test_a_chunk_that_no_tier_can_hold() -> None:
    of = engine(store=ChunkStore(None, memory="1kB"))
    with pytest.raises(OptionError, match=r"a chunk of 23 tokens takes [\d,]+ bytes and the chunk store holds 1,000"):
        of.add(Request(request_id="x", prompt=PROMPTS["ab"], params=greedy(2)))
    of.close()


@pytest.mark.parametrize(("name", "why"), [("opt", "no rotary position embedding"), ("gpt2", "no rotary")])
def test_models_without_rotation_are_refused(name: str, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        Engine(shared_model(name), method="full", chunk_store=ChunkStore(None))


def test_models_whose_frequencies_follow_the_length_are_refused() -> None:
    model = family("llama").make(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match="more than its own position"):
        Engine(model, method="full", chunk_store=ChunkStore(None))


def test_deviation_needs_the_lean_runner() -> None:
    of = engine(runner="modules")
    with pytest.raises(OptionError, match='pick="deviation" compares keys of the second layer'):
        of.add(Request(request_id="x", prompt=PROMPTS["ab"], cache=CacheOptions(pick="deviation")))
    of.close()


@pytest.mark.parametrize("parts", ["a text", [], [3], [mp.Chunk("x"), None], 7])
def test_what_is_no_prompt(parts: Any) -> None:
    with pytest.raises(OptionError):
        mp.Prompt(parts)


@pytest.mark.parametrize("content", ["", (), (True,), 3])
def test_what_is_no_chunk(content: Any) -> None:
    with pytest.raises(OptionError):
        mp.Chunk(content)
