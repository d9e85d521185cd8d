"""`bench batch`: its prompts, and a run of the machinery."""

from __future__ import annotations

import pytest

from millpond.errors import OptionError
from millpond_lab.bench.batch import BatchBench, markdown, parse_tree, ratios, run, tree_prompts
from millpond_lab.bench.generate.candidates import ModelShape


def test_prompts_part_where_the_tree_says() -> None:
    prompts = tree_prompts(parse_tree("2x220,6x260,6x50"), 512, 0)
    assert len(prompts) == len(set(prompts)) == 72
    assert sum(map(len, prompts)) == 38_160
    assert len({prompt[:220] for prompt in prompts}) == 2
    assert len({prompt[:480] for prompt in prompts}) == 12
    assert prompts != sorted(prompts)


@pytest.mark.parametrize("text", ["", "2x", "0x4", "3x4,5", "ax2"])
def test_trees_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="must be COUNTxTOKENS"):
        parse_tree(text)


def test_a_run_tells_what_each_order_spares() -> None:
    shape = ModelShape(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, ffn=16, vocab=64)
    data = run(BatchBench(tuple(parse_tree("2x20,2x20,2x4")), ("h2o",), new_tokens=2, repeats=1, shape=shape))
    rows = {row["order"]: row for row in data["results"]}
    for order in ("arrival", "sorted"):  # prompts that wait together share what the first of them stops at
        assert rows[order]["spared"] == pytest.approx(4 / 11)
    assert rows["batch"]["spared"] == pytest.approx(data["best"])
    assert len(ratios(data, "h2o", "sorted")) == 1
    assert "| h2o, batch |" in markdown(data)
