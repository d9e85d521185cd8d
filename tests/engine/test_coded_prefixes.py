"""Blocks of the prefix cache that nobody uses become codes, and prompts begin with what these decode to."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.cache.prefix_node import Behind, PrefixNode
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.outputs import PrefixStats
from millpond.engine.request import CacheOptions, Request
from tests.helpers.hf.transform import ids, tiny, transform_of_tiny

BLOCK = 32
COMMON = ids(200, 11).tolist()
#: Prompts of 9 full blocks; they have 6 in common.
FIRST, SECOND = (COMMON + ids(101, seed).tolist() for seed in (12, 13))


def engine_of(kind: str = "gqa", **options: Any) -> Engine:
    given = {"method": "full", "codec": "auto", "storage_codec": "transform:4", "storage_delay_s": 0.0}
    given |= {"calibration": transform_of_tiny(kind), "max_step_tokens": 100}
    return Engine(tiny(kind), **(given | options))


def request(prompt: list[int], name: str = "0", **rest: Any) -> Request:
    params = mp.SamplingParams(max_tokens=4, temperature=0, logprobs=1)
    return Request(request_id=name, prompt=prompt, params=params, **rest)


def ask(engine: Engine, prompt: list[int], name: str = "0", **rest: Any) -> Any:
    """The answer, with all pages checked behind each step."""
    engine.add(request(prompt, name, **rest))
    output: Any = None
    while engine.busy:
        output = [output, *engine.step()][-1]
        engine.check_integrity()
    return output.completions[0]


def settle(engine: Engine, most_s: float = 20.0) -> PrefixStats:
    """Let an engine without requests code all that is due."""
    until = time.monotonic() + most_s
    while engine.idle_s is not None and time.monotonic() < until:
        time.sleep(min(engine.idle_s, 0.005))
        engine.tidy()
        engine.check_integrity()
    found = engine.stats().prefix
    assert found is not None
    return found


def nodes(engine: Engine) -> list[PrefixNode]:
    return [*engine._parts.prefix_cache.tree._blocks.values()]


def logprobs(completion: Any) -> torch.Tensor:
    return torch.tensor([entry.logprob for entry in completion.logprobs])


def alone(prompt: list[int], **rest: Any) -> Any:
    engine = Engine(tiny("gqa"), method="full", codec="auto", prefix_cache=False)
    found = ask(engine, prompt, **rest)
    engine.close()
    return found


def test_what_nobody_uses_is_coded_and_spares_tokens() -> None:
    engine = engine_of()
    before = ask(engine, FIRST)
    assert before.kv.decoded_tokens == 0
    stats = settle(engine)
    assert (stats.blocks, stats.coded_blocks, stats.live_blocks) == (9, 7, 2)
    assert stats.storage_codec == "transform:4"
    assert stats.encoded == 7
    assert 0 < stats.coded_bytes < 7 * stats.live_bytes / 2
    assert stats.encode_s > 0
    found = ask(engine, SECOND, "1")
    assert found.kv.shared_tokens == found.kv.decoded_tokens == 6 * BLOCK
    assert not found.kv.exact
    reference = alone(SECOND)
    assert reference.kv.exact
    assert (logprobs(found)[:1] - logprobs(reference)[:1]).abs() < 0.2
    after = settle(engine)
    assert after.decoded == 6
    assert after.decoded_tokens == 6 * BLOCK
    assert after.encoded == 8  # the first of the three behind them; what was decoded keeps its codes
    engine.close()
    assert engine.stats().kv_bytes == 0


def test_codes_of_whole_units_do_not_depend_on_the_prompt_that_came() -> None:
    """Nor on how many tokens a pass reads; three of 256 tokens are exact by the queries of these alone."""
    found, begin = [], ids(320, 11).tolist()
    for end, tokens in ((ids(70, 12), 512), (ids(70, 13), 512), (ids(150, 13), 512), (ids(70, 12), 256)):
        engine = engine_of(max_step_tokens=tokens)
        ask(engine, begin + end.tolist())
        settle(engine)
        found.append([node.codes for node in nodes(engine)[:8]])
        engine.close()
    for codes in zip(*found, strict=True):
        assert codes[0] is not None
        assert all(torch.equal(codes[0], other) for other in codes[1:])


def test_blocks_behind_decoded_ones_are_of_their_own_kind() -> None:
    engine = engine_of()
    ask(engine, FIRST)
    settle(engine)
    ask(engine, SECOND, "1")
    behind = [node for node in nodes(engine) if isinstance(node.key[0], Behind)]
    assert [node.depth for node in behind] == [6, 7, 8]
    again = ask(engine, SECOND, "2")
    assert again.kv.shared_tokens == 9 * BLOCK
    exact = ask(engine, SECOND, "3", cache=CacheOptions(method="full", codec="auto"))
    assert exact.kv.shared_tokens == 9 * BLOCK
    engine.close()


def test_requests_that_need_exact_numbers_take_no_codes() -> None:
    engine = engine_of()
    ask(engine, FIRST)
    settle(engine)
    engine.add(
        Request(request_id="1", prompt=SECOND, params=mp.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    )
    (output,) = engine.drain()
    assert output.completions[0].kv is not None
    assert output.completions[0].kv.decoded_tokens == 0
    engine.close()


def test_a_deterministic_engine_has_no_codes(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(deterministic=True, max_step_tokens=256)
    assert "without transform:4" in caplog.text
    ask(engine, FIRST)
    stats = settle(engine)
    assert (stats.coded_blocks, stats.storage_codec) == (0, "")
    assert stats.blocks == 9
    engine.close()


@pytest.mark.parametrize("place", [0.001, 0.4, 0.9])
def test_a_damaged_block_and_what_follows_are_read_again(place: float) -> None:
    engine = engine_of()
    ask(engine, FIRST)
    settle(engine)
    damaged = nodes(engine)[3]
    assert damaged.codes is not None
    damaged.codes[int(place * len(damaged.codes))] ^= 8
    found = ask(engine, SECOND, "1")
    assert found.kv.shared_tokens == 3 * BLOCK
    stats = settle(engine)
    assert stats.lost == 1
    assert damaged not in nodes(engine)
    assert ask(engine, FIRST, "2").kv.shared_tokens == 6 * BLOCK
    engine.close()


def test_memory_makes_pages_go_and_codes_stay() -> None:
    prompts = [COMMON[:40] + ids(260, seed).tolist() for seed in range(20, 26)]
    engine = engine_of(kv_memory="300kB")
    for number, prompt in enumerate(prompts):
        ask(engine, prompt, f"{number}")
        settle(engine)
    stats = engine.stats().prefix
    assert stats is not None
    assert stats.coded_blocks > stats.live_blocks
    assert stats.evicted == 0
    shared = [ask(engine, prompt, f"again {number}").kv.shared_tokens for number, prompt in enumerate(prompts)]
    assert min(shared) >= 7 * BLOCK
    engine.close()


def test_blocks_leave_for_the_disk_as_codes_and_come_back(tmp_path: Path) -> None:
    prompts = [ids(300, seed).tolist() for seed in range(20, 32)]
    engine = engine_of(kv_memory="150kB", prefix_disk="10MB", prefix_folder=tmp_path)
    for number, prompt in enumerate(prompts):
        ask(engine, prompt, f"{number}")
        settle(engine)
    stats = engine.stats().prefix
    assert stats is not None
    assert stats.disk_blocks > 20
    assert stats.disk_bytes < stats.disk_blocks * stats.live_bytes / max(stats.live_blocks, 1)
    found = ask(engine, prompts[0], "again")
    assert found.kv.decoded_tokens >= 6 * BLOCK
    stats = engine.stats().prefix
    assert stats is not None
    assert stats.returned > 0
    assert stats.lost == 0
    engine.close()


def test_sums_stay_with_coded_blocks() -> None:
    engine = engine_of()
    cache = CacheOptions(method="h2o", budget=64, codec="auto")
    ask(engine, FIRST, cache=cache, marks=mp.PromptMarks(breakpoints=(4 * BLOCK, 6 * BLOCK)))
    settle(engine)
    assert any(node.codes is not None and node.sums for node in nodes(engine))
    found = ask(engine, SECOND, "1", cache=cache)
    assert (found.kv.shared_tokens, found.kv.decoded_tokens) == (6 * BLOCK, 4 * BLOCK)  # two wait for what follows
    engine.close()


def test_sums_come_back_from_the_disk(tmp_path: Path) -> None:
    engine = engine_of(kv_memory="150kB", prefix_disk="10MB", prefix_folder=tmp_path)
    cache = CacheOptions(method="h2o", budget=64, codec="auto")
    marks = mp.PromptMarks(breakpoints=(4 * BLOCK, 6 * BLOCK))
    ask(engine, FIRST, cache=cache, marks=marks)
    settle(engine)
    for seed in range(20, 30):
        ask(engine, ids(300, seed).tolist(), f"{seed}")
        settle(engine)
    first = nodes(engine)[5]
    assert first.stored is not None
    assert first.stored.sums
    found = ask(engine, SECOND, "1", cache=cache)
    assert (found.kv.shared_tokens, found.kv.decoded_tokens) == (6 * BLOCK, 4 * BLOCK)
    reference = alone(SECOND, cache=cache)
    assert (logprobs(found)[:1] - logprobs(reference)[:1]).abs() < 0.2
    engine.close()


@pytest.mark.parametrize("codec", ["int8", "int4", "rotated4", "kivi4"])
def test_formats_of_live_pages_have_codes_of_plain_numbers(codec: str) -> None:
    engine, found = engine_of("wide", codec=codec), []
    ask(engine, FIRST)
    stats = settle(engine)
    assert stats.coded_blocks == 7
    for one in (engine, Engine(tiny("wide"), method="full", codec=codec)):
        found.append(logprobs(ask(one, SECOND, "1"))[:1])
        one.close()
    assert (found[0] - found[1]).abs() < 0.2


def test_a_server_codes_while_nothing_runs() -> None:
    async def use() -> PrefixStats:
        llm = AsyncLLM(
            tiny("gqa"),
            EngineConfig(
                method="full",
                codec="auto",
                storage_codec="transform:4",
                storage_delay_s=0.05,
                calibration=transform_of_tiny("gqa"),
            ),
            model_name="tiny",
        )
        async for _ in llm.stream(request(FIRST)):
            pass
        until = time.monotonic() + 20
        while (prefix := llm.stats().prefix) is not None and prefix.coded_blocks < 7 and time.monotonic() < until:
            await asyncio.sleep(0.01)
        await llm.close()
        assert prefix is not None
        return prefix

    assert asyncio.run(use()).coded_blocks == 7


def test_requests_that_wait_end_and_nothing_stays() -> None:
    engine = engine_of()
    ask(engine, FIRST)
    settle(engine)
    engine.add(request(SECOND, "1"))
    engine.step()
    engine.cancel("1")
    engine.drain()
    assert ask(engine, SECOND, "2").kv.shared_tokens == 6 * BLOCK
    engine.close()
    assert engine.stats().kv_bytes == 0
