"""Spans that leave a live cache: what stays is that of a full cache with the span masked."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import millpond as mp
from millpond.errors import CacheMismatchError, OptionError
from millpond.hf.cache import MillpondCache
from tests.helpers.examples import examples
from tests.helpers.hf.families import family

HEADS, LAYERS, BUDGET = 2, 2, 24


@functools.cache
def model(name: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    return family(name).make(max_position_embeddings=2048)


def ids(n: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, (1, n), generator=torch.Generator().manual_seed(seed))


class Masked:
    """transformers' own cache of everything, some columns of which are hidden; in float64 unless another is given."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.cache, self.shown = DynamicCache(), torch.ones(1, 0, dtype=torch.long)

    def read(self, text: Tensor) -> Tensor:
        n = self.shown.shape[1]
        self.shown = torch.cat([self.shown, torch.ones_like(text)], 1)
        places = torch.arange(n, n + text.shape[1])[None]
        logits: Tensor = stock(self.dtype)(
            text, past_key_values=self.cache, attention_mask=self.shown, position_ids=places
        ).logits
        return logits

    def fork(self) -> Masked:
        other = Masked(self.dtype)
        other.cache, other.shown = copy.deepcopy(self.cache), self.shown.clone()
        return other


@functools.cache
def stock(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The same weights, which no cache of ours attends for."""
    made = family("llama").make(max_position_embeddings=2048)
    made.load_state_dict(model().state_dict())
    return made.to(dtype)


#: Largest difference of a logit (of at most 4) from the masked reference in float64. Stock attention in float32 differs
#: from it as much: what is more than 1e-6 is rounding, see `test_a_full_cache_equals_one_with_the_span_masked`.
CLOSE = 5e-6


def far(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max())


@torch.no_grad()
@pytest.mark.parametrize("spans", [[(3, 20)], [(0, 1), (30, 44)], [(10, 20), (20, 30), (44, 45)]])
def test_a_full_cache_equals_one_with_the_span_masked(spans: list[tuple[int, int]]) -> None:
    expected, single = Masked(), Masked(torch.float32)
    stock(), stock(torch.float32)
    with mp.compress(model(), "full", attach=False) as cache:
        for seed, n in ((1, 40), (2, 5)):
            expected.read(ids(n, seed)), single.read(ids(n, seed))
            model()(ids(n, seed), past_key_values=cache)
        cache.forget(*spans)
        for begin, end in spans:
            expected.shown[:, begin:end] = single.shown[:, begin:end] = 0
        left = expected.shown[0].nonzero()[:, 0].tolist()
        assert all(cache.positions(layer) == [left] * HEADS for layer in range(LAYERS))
        ours = theirs = 0.0
        for seed, n in ((3, 7), (4, 1), (5, 2), (6, 1)):
            right = expected.read(ids(n, seed))
            ours = max(ours, far(model()(ids(n, seed), past_key_values=cache).logits, right))
            theirs = max(theirs, far(single.read(ids(n, seed)), right))
        assert ours < CLOSE
        assert ours < 2 * theirs, "no farther from float64 than stock attention in float32"
        assert cache.stats().seen == [56]
        cache.check_integrity()


@torch.no_grad()
@pytest.mark.parametrize("codec", ["auto", "int4"])
def test_a_compressed_cache_loses_the_span_in_every_head(codec: str) -> None:
    wide = family("llama").make(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    with mp.compress(wide, "h2o", 180, codec, attach=False) as cache:
        wide(ids(240), past_key_values=cache)
        held = [layer_cache.read(0) for layer_cache in cache.layer_caches]
        before = [cache.positions(layer) for layer in range(LAYERS)]
        cache.forget((20, 150))
        after = [cache.positions(layer) for layer in range(LAYERS)]
        assert after == [[[p for p in head if not 20 <= p < 150] for head in layer] for layer in before]
        for layer_cache, was in zip(cache.layer_caches, held, strict=True):
            now = layer_cache.read(0)
            for head in range(HEADS):
                n = len(after[layer_cache.index][head])
                stays = (was.positions[head] >= 0) & ((was.positions[head] < 20) | (was.positions[head] >= 150))
                assert 0 < n < len(before[layer_cache.index][head])
                assert torch.equal(now.scores[head, :n], was.scores[head][stays]), "sums stay"
                # survivors of pages that are at least half dead are encoded again, as after any plan
                step = 0.0 if codec == "auto" else 1.0
                torch.testing.assert_close(
                    now.values[head, :n].float(), was.values[head][stays].float(), rtol=0.0, atol=step
                )
        wide(ids(9, 1), past_key_values=cache)
        assert cache.stats().seen == [249]
        assert max(map(len, cache.positions(0))) <= 180
        cache.check_integrity()


@torch.no_grad()
def test_the_next_turn_reads_its_new_tokens_alone() -> None:
    passes: list[int] = []
    with mp.compress(model(), "h2o", BUDGET) as cache:
        said = model().generate(ids(50), cache=cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
        cache.forget((5, 30))
        embed: Any = model().get_input_embeddings()
        hook = embed.register_forward_hook(lambda _, given, out: passes.append(given[0].shape[1]))
        more = torch.cat([said, ids(6, 9)], 1)
        model().generate(more, cache=cache, max_new_tokens=2, do_sample=False, pad_token_id=0)
        hook.remove()
    assert passes == [7, 1], "six new ones, and the last of the answer before"


@torch.no_grad()
def test_one_of_two_sequences_forgets() -> None:
    with mp.compress(model(), "full", attach=False) as cache:
        model()(torch.cat([ids(20), ids(20, 1)]), past_key_values=cache)
        cache.forget((4, 9), sequence=1)
        assert cache.positions(0, 0) == [list(range(20))] * HEADS
        assert cache.positions(0, 1) == [[*range(4), *range(9, 20)]] * HEADS


@torch.no_grad()
def test_tokens_are_taken_back_where_a_pass_is_recorded() -> None:
    with mp.compress(model(), "full", attach=False) as cache:
        model()(ids(20), past_key_values=cache)
        cache.forget((4, 9))
        other = cache.fork()
        for one in (cache, other):
            with pytest.raises(CacheMismatchError, match="cannot take back"):
                one.crop(-2)
        other.close()
        cache.activate_past_recording()
        model()(ids(5, 1), past_key_values=cache)
        cache.crop(-2)
        assert cache.positions(0) == [[*range(4), *range(9, 23)]] * HEADS
        cache.reset()
        model()(ids(20), past_key_values=cache)
        cache.crop(-2)
        assert cache.positions(0) == [list(range(18))] * HEADS


@pytest.mark.parametrize(
    ("span", "said"),
    [
        ((5, 5), "one token at least"),
        ((-1, 3), "lie in"),
        ((3, 21), "0 to 19"),
        ((1.0, 3), "whole"),
        (7, "whole"),
        ((True, 3), "whole"),
        ("ab", "whole"),
    ],
)
@torch.no_grad()
def test_spans_outside_the_text_are_refused(span: Any, said: str) -> None:
    with mp.compress(model(), "full", attach=False) as cache:
        with pytest.raises(OptionError, match="read nothing"):
            cache.forget((1, 3))
        model()(ids(20), past_key_values=cache)
        with pytest.raises(OptionError, match=said):
            cache.forget(span)
        with pytest.raises(OptionError, match="the cache holds 1"):
            cache.forget((1, 3), sequence=1)
        with pytest.raises(OptionError, match=r"\[4, 8\) overlaps \[2, 5\)"):
            cache.forget((4, 8), (2, 5))
        with pytest.raises(OptionError, match="no span"):
            cache.forget()
        assert cache.positions(0) == [list(range(20))] * HEADS


@torch.no_grad()
def test_kept_spans_are_not_forgotten() -> None:
    with mp.compress(model(), "h2o", BUDGET, attach=False) as cache:
        cache.protect([(10, 14)])
        model()(ids(60), past_key_values=cache)
        with pytest.raises(OptionError, match=r"tokens of \[10, 14\), which protect\(\) keeps"):
            cache.forget((13, 30))
        cache.forget((14, 30))
        assert all({10, 11, 12, 13} <= set(head) for layer in range(LAYERS) for head in cache.positions(layer))


@pytest.mark.parametrize(
    ("method", "said"), [("d2o", "merges"), ("streaming", "positions='absolute'"), ("infllm", "blocks")]
)
@torch.no_grad()
def test_methods_that_cannot_forget_say_why(method: str, said: str) -> None:
    with mp.compress(model(), method, None if method == "infllm" else BUDGET, attach=False) as cache:
        model()(ids(60), past_key_values=cache)
        before = cache.positions(0)
        with pytest.raises(OptionError, match=said):
            cache.forget((5, 9))
        assert cache.positions(0) == before


#: Methods that remember more of a text than its entries, and options under which a plan counts them.
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("h2o", {"decode": "once"}),
    ("h2o", {"decode": "grow"}),
    ("snapkv", {"window": 8}),
    ("ada", {"score": "h2o"}),
    ("fastgen", {"special": "0;1", "punctuation": "2"}),
    ("kvzip", {"ask": "none"}),
    ("expected_attention", {}),
    ("streaming", {"positions": "absolute"}),
    ("lagkv", {}),
    ("keydiff", {}),
]


@pytest.mark.parametrize(("method", "options"), OTHERS)
@torch.no_grad()
def test_later_turns_of_other_methods_go_on(method: str, options: dict[str, Any]) -> None:
    with mp.compress(model(), method, BUDGET, attach=False, **options) as cache:
        model()(ids(60), past_key_values=cache)
        cache.forget((5, 20), (40, 50))
        for seed, n in ((1, 9), (2, 1), (3, 1), (4, 7)):
            model()(ids(n, seed), past_key_values=cache)
            for layer in range(LAYERS):
                for head in cache.positions(layer):
                    assert not {*range(5, 20), *range(40, 50)} & set(head)
                    assert head == sorted(set(head))
        assert cache.stats().seen == [78]
        cache.check_integrity()


@torch.no_grad()
def test_a_cache_below_its_budget_is_still_compressed_once() -> None:
    """What was forgotten is not taken for what a plan has evicted."""
    with mp.compress(model(), "h2o", BUDGET, attach=False, decode="once") as cache:
        model()(ids(20), past_key_values=cache)
        cache.forget((4, 9))
        model()(ids(40, 1), past_key_values=cache)
        assert max(len(head) for layer in range(LAYERS) for head in cache.positions(layer)) <= BUDGET


@torch.no_grad()
def test_a_document_remembers_what_was_forgotten(tmp_path: Path) -> None:
    with mp.compress(model(), "full", attach=False) as cache:
        model()(ids(20), past_key_values=cache)
        cache.forget((4, 9))
        mp.save_document(cache, ids(20), tmp_path / "text.safetensors")
        expected = model()(ids(5, 1), past_key_values=cache).logits
    restored, _ = mp.restore_document(model(), tmp_path / "text.safetensors")
    with restored:
        assert restored.tracker.marks.dropped.of(0) == ((4, 9),)
        assert torch.equal(model()(ids(5, 1), past_key_values=restored).logits, expected)
        with pytest.raises(CacheMismatchError, match="cannot take back"):
            restored.crop(-2)


class Conversation(RuleBasedStateMachine):
    """Turns, steps, forks and spans that go, in any order; each fork for itself."""

    method: str = "full"
    budget: int | None = None

    @initialize()
    def begin(self) -> None:
        stock()
        self.caches: list[MillpondCache] = [mp.compress(model(), self.method, self.budget, attach=False)]
        self.masked = [Masked()]
        self.gone: list[set[int]] = [set()]
        self.count = 0
        self.turn(0, 12)

    @rule(which=st.integers(0, 9), n=st.sampled_from([1, 1, 2, 9]))
    @torch.no_grad()
    def turn(self, which: int, n: int) -> None:
        which %= len(self.caches)
        self.count += 1
        text = ids(n, self.count)
        found = model()(text, past_key_values=self.caches[which]).logits
        if self.budget is None:
            assert far(found, self.masked[which].read(text)) < CLOSE

    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        if len(self.caches) < 3:
            which %= len(self.caches)
            self.caches.append(self.caches[which].fork())
            self.masked.append(self.masked[which].fork())
            self.gone.append(set(self.gone[which]))

    @rule(which=st.integers(0, 9), begin=st.integers(0, 40), length=st.integers(1, 15))
    def forget(self, which: int, begin: int, length: int) -> None:
        which %= len(self.caches)
        seen = self.caches[which].stats().seen[0]
        begin = min(begin, seen - 2)
        end = min(begin + length, seen - 1)
        self.caches[which].forget((begin, end))
        self.gone[which] |= set(range(begin, end))
        if self.budget is None:
            self.masked[which].shown[:, begin:end] = 0

    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        if len(self.caches) > 1:
            which %= len(self.caches)
            self.caches.pop(which).close()
            self.masked.pop(which)
            self.gone.pop(which)

    @invariant()
    def nothing_forgotten_is_held(self) -> None:
        for cache, gone in zip(getattr(self, "caches", []), getattr(self, "gone", []), strict=True):
            cache.check_integrity()
            for layer in range(LAYERS):
                for head in cache.positions(layer):
                    assert not gone & set(head)
                    assert self.budget is None or len(head) <= self.budget

    def teardown(self) -> None:
        pools = self.caches[0].pools
        for cache in self.caches:
            cache.close()
        assert all(pool.n_live == 0 for pool in pools), "no page is leaked"


class CompressedConversation(Conversation):
    method, budget = "h2o", 16


_SETTINGS = settings(
    max_examples=examples(10), stateful_step_count=10, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestConversation = Conversation.TestCase
TestConversation.settings = _SETTINGS
TestCompressedConversation = CompressedConversation.TestCase
TestCompressedConversation.settings = _SETTINGS


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Conversation, CompressedConversation])
def test_two_hundred_conversations(machine: type[Conversation]) -> None:
    run_state_machine_as_test(machine, settings=settings(_SETTINGS, max_examples=100, stateful_step_count=20))
