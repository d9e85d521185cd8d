"""Paging rules in the engine's prefix tree: one access for each prompt, held blocks stay, tokens do not change."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool
from millpond.cache.paging.choose import rule_named
from millpond.cache.paging.lru import LeastRecentlyUsed
from millpond.cache.paging.rule import PageFacts
from millpond.cache.prefix_tree import PrefixTree
from millpond.cli.app import app
from millpond.cli.serve import EngineChoice
from millpond.engine.config import EngineConfig
from millpond.errors import OptionError
from tests.engine.test_prefix_cache import TEXTS, alone, one_by_one, request
from tests.engine.test_request_life_shared import LIMIT, SLOTS, SharedLife
from tests.helpers.engine.helpers import engine_for, tokens


class Noted(LeastRecentlyUsed):
    """LRU that remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[PageFacts] = []

    def touch(self, page: int, facts: PageFacts) -> None:
        super().touch(page, facts)
        self.facts.append(facts)


def table_of(pool: PagePool, blocks: int) -> PageTable:
    ids = pool.allocate(blocks)
    table = PageTable.of_pages(pool, ids[None])
    pool.release(ids)
    return table


def a_pool() -> PagePool:
    return PagePool(4, 4, torch.float32, slots=2)


def test_each_prompt_is_one_access_to_each_of_its_blocks() -> None:
    rule, pool = Noted(), a_pool()
    tree = PrefixTree(rule)
    tables = [table_of(pool, n) for n in (3, 4, 3)]
    tree.keep("kind", np.arange(6), [tables[0]])
    assert [(facts.depth, facts.length, facts.known) for facts in rule.facts] == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]
    part = tree.new_request()
    for end in (4, 8, 8):  # a prompt that is kept as it is read
        tree.keep("kind", np.array([0, 1, 2, 3, 9, 9, 9, 9])[:end], [tables[1]], part)
    later = rule.facts[3:]
    assert [(facts.depth, facts.request, facts.known) for facts in later] == [
        (0, part, 2),
        (1, part, 2),
        (2, part, 2),
        (3, part, 2),
    ]
    assert [facts.key for facts in later[:2]] == [facts.key for facts in rule.facts[:2]]
    assert len({facts.key for facts in rule.facts}) == 5
    tree.clear()
    assert len(tree) == 0


def test_blocks_that_requests_hold_stay_and_go_once_they_are_released() -> None:
    pool = a_pool()
    tree = PrefixTree()
    held, free = table_of(pool, 2), table_of(pool, 2)
    tree.keep("kind", np.arange(4), [held])
    tree.keep("kind", np.arange(10, 14), [free])
    free.release_all()
    assert not tree.evict(lambda: False)
    assert len(tree) == 2
    assert tree.evicted == 2
    assert not tree.evict(lambda: False)
    assert len(tree) == 2
    held.release_all()
    assert tree.evict(lambda: len(tree) == 0)
    assert tree.evicted == 4
    assert pool.n_live == 0


def test_lfu_keeps_the_beginning_that_many_prompts_have() -> None:
    pool = a_pool()
    lfu = PrefixTree(rule_named("lfu"))
    for tree, stays in ((lfu, True), (PrefixTree(), False)):
        for text in ([1, 1], [1, 1], [2, 2]):
            table = table_of(pool, 1)
            tree.keep("kind", np.array(text), [table])
            table.release_all()
        assert tree.evict(lambda tree=tree: len(tree) == 1)
        assert bool(tree.find("kind", np.array([1, 1]), 2)) == stays
        tree.clear()


@pytest.mark.parametrize("rule", ["learned", "mark0"])
def test_a_rule_changes_no_token(rule: str) -> None:
    engine = engine_for("full", prefix_cache=rule)
    done = one_by_one(engine, *(request(name, "full") for name in "abcda"))
    for name in "abcd":
        assert tokens(done[f"{name}-full"]) == alone(name, "full")
    prefix = engine.stats().prefix
    assert prefix is not None
    assert prefix.rule == rule
    blocks = [len(TEXTS[name]) // 4 for name in "abcda"]
    assert prefix.hits > 0
    assert prefix.hits + prefix.misses == sum(blocks)
    assert prefix.blocks == len(engine._parts.prefix_cache.tree)
    assert prefix.evicted == 0
    engine.close()
    without = engine_for("full")
    assert without.stats().prefix is None
    without.close()


class LearnedLife(SharedLife):
    """The life of requests that share, under the learned rule."""

    def make(self) -> object:  # type: ignore[override]
        return engine_for("full", kv_memory=LIMIT, overcommit=3, prefix_cache="learned", page_slots=SLOTS)


TestLearnedLife = pytest.mark.slow(LearnedLife.TestCase)
TestLearnedLife.settings = SharedLife.TestCase.settings
pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")


def test_the_option_is_checked() -> None:
    assert EngineConfig(prefix_cache=True).prefix_cache is True
    with pytest.raises(OptionError, match="did you mean 'learned'"):
        EngineConfig(prefix_cache="learnd")
    with pytest.raises(OptionError, match="only a replay does"):
        EngineConfig(prefix_cache="belady")
    with pytest.raises(OptionError, match="'lfu' predicts nothing"):
        EngineConfig(prefix_cache="lfu", pager="a.safetensors")


def test_options_of_serve() -> None:
    assert EngineChoice().as_arguments()["prefix_cache"] == "live"
    assert EngineChoice(no_prefix_cache=True).as_arguments()["prefix_cache"] is False
    assert EngineChoice(settings={"kv_memory": "1GiB"}).as_arguments()["prefix_cache"] is True
    assert EngineChoice(settings={"kv_memory": "1GiB"}, no_prefix_cache=True).as_arguments()["prefix_cache"] is False
    assert EngineChoice(prefix_cache="learned").as_arguments()["prefix_cache"] == "learned"
    with pytest.raises(OptionError, match="contradict"):
        EngineChoice(prefix_cache="lru", no_prefix_cache=True).as_arguments()


def a_trace(file: Path) -> None:
    """Conversations of three turns each, in Mooncake's format."""
    draw, lines, key = random.Random(0), [], 1
    open_ones: list[list[int]] = []
    for at in range(260):
        if not open_ones or draw.random() < 0.5:
            open_ones.append([0])
        ids = open_ones[draw.randrange(len(open_ones))]
        ids += range(key, key + 2)
        key += 2
        row = {"timestamp": at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        lines.append(json.dumps(row))
        if len(ids) > 6:
            open_ones.remove(ids)
    file.write_text("\n".join(lines), encoding="utf-8")


def test_a_pager_is_trained_on_a_trace_benched_and_used(tmp_path: Path) -> None:
    trace, pager = tmp_path / "trace.jsonl", tmp_path / "pager.safetensors"
    a_trace(trace)
    run = CliRunner().invoke
    trained = run(app, ["train", "pager", "--trace", f"mooncake:{trace}", "--out", str(pager)])
    assert trained.exit_code == 0, trained.output
    assert engine_for("full", prefix_cache="learned", pager=pager).config.pager == pager
    asked = ["bench", "paging", "--trace", f"mooncake:{trace}", "--pages", "30", "--cost-pages", "100"]
    benched = run(app, [*asked, "--rules", "lru,belady,learned", "--out", str(tmp_path)])
    assert benched.exit_code == 0, benched.output
    data = json.loads((tmp_path / "paging.json").read_text(encoding="utf-8"))
    rates = {row["rule"]: row["hit_rate"] for row in data["results"]}
    assert 0 < rates["lru"] < rates["belady"]
    assert rates["learned"] > 0
    assert [cost["rule"] for cost in data["costs"]] == ["lru", "belady", "learned"]
    for wrong in (["--pages", "0"], ["--rules", "lur"], ["--trace", "azure:x"]):
        assert isinstance(run(app, [*asked, *wrong]).exception, OptionError | SystemExit)


def test_metrics_name_the_rule() -> None:
    from millpond.engine.outputs import PrefixStats
    from millpond.server.metrics import _of_prefix_cache

    found = {
        (sample.name, sample.labels["rule"]): sample.value
        for metric in _of_prefix_cache(PrefixStats("lfu", 5, 4, 3, 2, 10, 9, 8, 7, 6, *range(11, 21)))
        for sample in metric.samples
    }
    assert found == {
        ("millpond_prefix_blocks", "lfu"): 5,
        ("millpond_prefix_sums_bytes", "lfu"): 10,
        ("millpond_prefix_disk_blocks", "lfu"): 9,
        ("millpond_prefix_disk_bytes", "lfu"): 8,
        ("millpond_prefix_blocks_returned_total", "lfu"): 7,
        ("millpond_prefix_blocks_lost_total", "lfu"): 6,
        ("millpond_prefix_block_hits_total", "lfu"): 4,
        ("millpond_prefix_block_misses_total", "lfu"): 3,
        ("millpond_prefix_blocks_evicted_total", "lfu"): 2,
        ("millpond_prefix_coded_blocks", "lfu"): 11,
        ("millpond_prefix_coded_bytes", "lfu"): 12,
        ("millpond_prefix_blocks_encoded_total", "lfu"): 16,
        ("millpond_prefix_blocks_decoded_total", "lfu"): 17,
        ("millpond_prefix_encode_seconds_total", "lfu"): 18,
        ("millpond_prefix_decode_seconds_total", "lfu"): 19,
        ("millpond_prefix_decoded_tokens_total", "lfu"): 20,
    }
