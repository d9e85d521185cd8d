"""Requests of many formats and methods in one engine whose memory is short: one that fits alone never fails."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millpond.cache.pages.ref_counted_pool import Pool
from millpond.cache.paging.choose import keeps_prompts
from millpond.codec.transform.transform_file import ModelTransform
from millpond.engine.engine import Engine
from millpond.engine.memory_estimate import estimate
from millpond.engine.prefix_cache import PrefixCache
from millpond.engine.request import CacheOptions, Request
from millpond.hf.calibration.transform import calibrate_transform
from tests.engine.test_codecs import model, prompt
from tests.helpers.engine.helpers import greedy, tokens
from tests.helpers.examples import examples
from tests.helpers.hf.transform import ids

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")

#: A method, its options and its budget.
METHODS: dict[str, tuple[dict[str, Any], str | None]] = {
    "full": ({}, None),
    "snapkv": ({"window": 8}, "60%"),
    "h2o": ({}, "60%"),
    "streaming": ({"positions": "absolute"}, "60%"),
}
#: Formats of every kind of page: as they are, in fewer bits, by group, by channel, rotated, with layers or ages of
#: their own.
CODECS = (
    None,
    "bf16",
    "int8",
    "int4",
    "kivi2",
    "fp8",
    "flexgen4",
    "rotated4",
    "0=bf16,1=int4",
    "bf16:20,kivi4:50,kivi2",
)
#: Prompts: two that begin alike on several levels, and some that do not.
TEXTS = (
    tuple(prompt(300)),
    tuple(prompt(300)[:200] + prompt(90)[:70]),
    tuple(prompt(300)[:97]),
    tuple(prompt(210)),
    tuple(prompt(150)),
    tuple(prompt(33)),
)
NEW = 24


def options(method: str, codec: str | None) -> CacheOptions:
    of_method, budget = METHODS[method]
    return CacheOptions(method=method, options=of_method, budget=budget, codec="auto" if codec is None else codec)


@cache
def alone(method: str, codec: str | None, text: int) -> list[int]:
    """The answer of an engine that has no limit and nothing else to do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        engine = Engine(model(), method="full", deterministic=True)
        engine.add(Request(request_id="", prompt=TEXTS[text], params=greedy(NEW), cache=options(method, codec)))
        (done,) = engine.drain()
    engine.close()
    return tokens(done)


@cache
def transform() -> ModelTransform:
    return calibrate_transform(model(), [ids(512, seed) for seed in range(16)], length=512)


def need(method: str, codec: str | None, n_tokens: int, new: int = NEW, n: int = 1, page_slots: int = 16) -> int:
    """Bytes that a request holds at most, alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        engine = Engine(model(), method="full", page_slots=page_slots)
        group = engine._parts.decode_groups.group(options(method, codec))
        found = estimate(group.cache_factory, n_tokens, new, n).peak(n)
    engine.close()
    return found


@pytest.fixture(autouse=True)
def _no_more_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_evictions(monkeypatch)


def watch_evictions(patch: pytest.MonkeyPatch) -> None:
    """Assert that blocks are evicted until there is room, and no further: the last one, and a chunk, are beyond it."""
    real = PrefixCache.make_room

    def has(self: PrefixCache, pages: Mapping[Pool, int]) -> bool:
        memory_limit, tree = self._memory_limit, self.tree
        sizes: list[int] = []
        let_go = tree._drop

        def drop(block: Any) -> None:
            sizes.append(sum(pool.page_bytes * len(ids) for pool, ids in zip(block.pools, block.pages, strict=True)))
            let_go(block)

        patch.setattr(tree, "_drop", drop, raising=False)
        try:
            found = real(self, pages)
        finally:
            patch.delattr(tree, "_drop")
        if sizes and memory_limit.limit_bytes is not None and found:
            own = sum(pool.n_live * pool.page_bytes for pool in memory_limit.pools)
            wanted = sum(n * pool.page_bytes for pool, n in pages.items())
            left = memory_limit.limit_bytes - own - wanted
            assert left < sizes[-1] + memory_limit.arena_bytes, (
                f"{len(sizes)} blocks were evicted, and {left} bytes are left"
            )
        return found

    patch.setattr(PrefixCache, "make_room", has)


class PoolLife(RuleBasedStateMachine):
    """Whatever formats and methods meet: a request that fits alone ends without an error, with its own tokens.

    Beside a storage codec, whose engine is not deterministic, tokens may be others.
    """

    @initialize(
        memory=st.sampled_from([1.0, 1.1, 1.5, 3.0]),
        overcommit=st.sampled_from([1, 3]),
        prefix=st.sampled_from([False, "live", "lru", "lfu"]),
        disk=st.booleans(),
        storage=st.sampled_from([None, "swap", "codes"]),
    )
    def begin(self, memory: float, overcommit: int, prefix: str | bool, disk: bool, storage: str | None) -> None:
        page_slots = 16 if storage is None else 32
        most = max(
            need(method, codec, len(TEXTS[0]), n=n, page_slots=page_slots)
            for method in METHODS
            for codec in CODECS
            for n in (1, 2)
        )
        self.limit, self.same = int(most * memory), storage is None
        codes: dict[str, Any] = {} if storage is None else {"preemption": storage, "calibration": transform()}
        if storage is not None:
            codes |= {"storage_codec": "transform:1.5", "storage_delay_s": 0.0}
        self.engine = Engine(
            model(),
            method="full",
            kv_memory=self.limit,
            overcommit=overcommit,
            prefix_cache=prefix,
            prefix_disk="1MiB" if disk and keeps_prompts(prefix) else None,
            page_slots=page_slots,
            max_step_tokens=256,
            deterministic=self.same,
            **codes,
        )
        self.asked: dict[str, tuple[str, str | None, int]] = {}
        self.done: set[str] = set()

    @rule(
        method=st.sampled_from(list(METHODS)),
        codec=st.sampled_from(CODECS),
        text=st.integers(0, len(TEXTS) - 1),
        new=st.integers(1, NEW),
        n=st.integers(1, 2),
    )
    def come(self, method: str, codec: str | None, text: int, new: int, n: int) -> None:
        name = str(len(self.asked))
        self.asked[name] = method, codec, text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=UserWarning)
            self.engine.add(
                Request(request_id=name, prompt=TEXTS[text], params=greedy(new, n=n), cache=options(method, codec))
            )

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=UserWarning)
            for _ in range(times):
                for output in self.engine.step():
                    assert output.error is None, f"{self.asked[output.request_id]}: {output.error}"
                    for index in range(len(output.completions)):
                        found = tokens(output, index)
                        assert not self.same or found == alone(*self.asked[output.request_id])[: len(found)]
                    if output.finished:
                        self.done.add(output.request_id)

    @precondition(lambda self: len(self.asked) > len(self.done))
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        going = sorted(set(self.asked) - self.done)
        self.engine.cancel(going[which % len(going)])

    @invariant()
    def pages_have_holders_and_the_limit_is_kept(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.busy:
            self.step(1)
        assert self.done == set(self.asked)
        self.engine.check_integrity()
        self.engine.close()
        assert self.engine.stats().kv_reserved == 0


def run_life(n: int) -> None:
    run_state_machine_as_test(
        PoolLife, settings=settings(max_examples=n, stateful_step_count=14, suppress_health_check=list(HealthCheck))
    )


@pytest.mark.slow
def test_requests_that_fit_alone_never_fail() -> None:
    run_life(examples(10))


@pytest.mark.slow
def test_requests_that_fit_alone_never_fail_in_many_lives() -> None:
    run_life(200)


def one_after_another(codec: str | None, limit: int, lengths: Sequence[int], method: str = "full") -> list[int]:
    """Blocks of the prefix cache behind each of some requests, which all must succeed."""
    engine = Engine(model(), method="full", kv_memory=limit, prefix_cache="lru", page_slots=16)
    blocks = []
    for n, length in enumerate(lengths):
        text = tuple(torch.randint(2, 96, (length,), generator=torch.Generator().manual_seed(n)).tolist())
        engine.add(Request(request_id=str(n), prompt=text, params=greedy(4), cache=options(method, codec)))
        (output,) = engine.drain()
        assert output.error is None, f"request {n} of {length} tokens: {output.error}"
        engine.check_integrity()
        blocks.append(engine.stats().prefix.blocks)  # type: ignore[union-attr]
    engine.close()
    return blocks


@pytest.mark.in_turns(0, of=3)
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec is not None])
def test_a_full_prefix_cache_gives_up_as_many_blocks_as_a_prompt_of_any_format_needs(codec: str) -> None:
    limit = 3 * need("full", codec, 320, 4)
    blocks = one_after_another(codec, limit, [160] * 20 + [320])
    full, after = blocks[-2], blocks[-1]
    assert full > 40
    assert after >= full - 2 * 20  # it has 20 of its own, and its plan takes no more than they do


@pytest.mark.parametrize("codec", ["int8", "rotated4"])
def test_prompts_that_fit_just_alone_run_one_after_another(codec: str) -> None:
    limit = need("full", codec, 353, 4)
    one_after_another(codec, limit, [353, 305, 321, 337, 353, 340, 350, 310])


def test_formats_take_turns_in_memory_for_one() -> None:
    limit = max(need(method, codec, 320, 4) for method in METHODS for codec in CODECS)
    engine = Engine(model(), method="full", kv_memory=limit, prefix_cache="lru", page_slots=16)
    for n, (method, codec) in enumerate([(method, codec) for codec in CODECS for method in METHODS]):
        text = tuple(torch.randint(2, 96, (320,), generator=torch.Generator().manual_seed(n)).tolist())
        engine.add(Request(request_id=str(n), prompt=text, params=greedy(4), cache=options(method, codec)))
        (output,) = engine.drain()
        assert output.error is None, f"{method} {codec}: {output.error}"
        engine.check_integrity()
    engine.close()
