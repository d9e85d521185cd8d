"""`bench chunks`: its prompts, and a run of the machinery."""

from __future__ import annotations

import pytest

from millpond.errors import OptionError
from millpond_lab.bench.chunks import ChunkBench, markdown, queries, random_chunks, run, shuffled
from millpond_lab.bench.generate.candidates import ModelShape
from millpond_lab.cli.bench.chunks import parse_shares


def test_queries_hold_different_chunks_in_random_order() -> None:
    chunks = random_chunks(10, 4, 64, 0)
    assert len(set(chunks)) == 10
    found = list(queries(chunks, 20, 3, (1, 2), 0))
    assert all(len(set(prompt.parts)) == 4 and prompt.parts[-1] == (1, 2) for prompt in found)
    assert len({part for prompt in found for part in prompt.parts}) == 11
    assert found == list(queries(chunks, 20, 3, (1, 2), 0))
    assert shuffled(chunks, (1,), 0) != shuffled(chunks, (1,), 1)


def test_shares() -> None:
    assert parse_shares("auto, 0.15,1") == ("auto", 0.15, 1.0)
    for text in ("", "auto,x", "1.5", "nan"):
        with pytest.raises(OptionError):
            parse_shares(text)


def test_a_run_tells_what_is_computed() -> None:
    shape = ModelShape(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, ffn=16, vocab=64)
    data = run(
        ChunkBench(3, 12, 4, (0.5, 0.0), repeats=1, n_queries=16, per_query=2, pool=6, query_tokens=8, shape=shape)
    )
    rows = {(row["tier"], row["share"]): row["computed"] for row in data["first_token"]}
    assert rows == {
        ("", 1): 1.0,
        **{(tier, 0.5): pytest.approx((3 * 6 + 4) / 40, abs=1 / 40) for tier in ("memory", "disk")},
        **{(tier, 0.0): pytest.approx(5 / 40) for tier in ("memory", "disk")},
    }
    assert len(data["quarters"]) == 4
    assert data["quarters"][0]["computed"] > data["quarters"][-1]["computed"] > 0
    assert data["quarters"][-1]["hits"] > 0
    page = markdown(data)
    assert "| plain | 100% |" in page
    assert "| disk, 50% |" in page
    assert "| 4 | 0." in page
