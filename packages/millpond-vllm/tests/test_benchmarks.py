"""Benchmarks without an engine: loads that they make, rows that they read, tables that they write."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "benchmarks"
ROW = {
    "requests": 24,
    "prompt": 3000,
    "new": 512,
    "blocks": 500,
    "dtype": "bfloat16",
    "at_once": 4.0,
    "decode_tokens_s": 100.0,
    "end_to_end_tokens_s": 60.0,
    "bound_tokens_s": 200.0,
    "cpu_seconds": 300.0,
}


@pytest.fixture(scope="module")
def eviction():
    return runpy.run_path(str(SCRIPTS / "eviction.py"))


@pytest.fixture(scope="module")
def hit_rates():
    return runpy.run_path(str(SCRIPTS / "hit_rates.py"))


def test_rows_of_each_model_have_a_table_and_those_that_name_none_are_of_the_first(eviction, tmp_path):
    file, qwen = tmp_path / "rows.jsonl", {"model": "Qwen", "cpu": "Some CPU"}
    rows = [
        {"setting": "stock", **ROW},
        {"setting": "snapkv 20%", **ROW, "at_once": 16.0},
        {"setting": "stock", **ROW, **qwen},
        {"setting": "h2o 20%", **ROW, **qwen, "at_once": 8.0, "note": "Other work ran."},
        {"setting": "millpond h2o 20%", **ROW, **qwen, "at_once": 6.0},
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    first, first_table, second, second_table, note = eviction["tables"](eviction["read_rows"](file)).split("\n\n")
    assert first == "SmolLM2-135M, 24 requests of 3,000 + 512 tokens, 500 blocks, bfloat16, AMD EPYC:"
    assert second == "Qwen, 24 requests of 3,000 + 512 tokens, 500 blocks, bfloat16, Some CPU:"
    assert "| snapkv 20% | 1 | 16 (4.00 x) |" in first_table
    assert "h2o" not in first_table
    assert "| h2o 20% | 1 | 8 (2.00 x) |" in second_table
    assert "| millpond h2o 20% | 1 | 6 (1.50 x) |" in second_table
    assert note == "Other work ran."
    assert eviction["read_rows"](tmp_path / "none.jsonl") == []


def test_hit_rates_stand_beside_those_of_vllm_alone(hit_rates):
    load = {"requests": 10, "blocks": 100, "at_once": 8, "queries": 1000}
    rows = [
        {"setting": "stock", "load": "trace", **load, "hits": 200},
        {"setting": "snapkv 20%", "load": "trace", **load, "hits": 190},
        {"setting": "stock", "load": "chats", **load, "hits": 800},
    ]
    lines = hit_rates["tables"](rows).splitlines()
    assert lines[2:] == ["| stock | 20.0 % | 80.0 % |", "| snapkv 20% | 19.0 % (-1.0) | - |"]


def test_a_block_of_the_trace_is_a_block_of_vllm(hit_rates, tmp_path):
    file = tmp_path / "trace.jsonl"
    requests = [
        {"input_length": 1000, "output_length": 512, "hash_ids": [0, 1]},
        {"input_length": 5000, "output_length": 512, "hash_ids": list(range(10))},
        {"input_length": 1536, "output_length": 3, "hash_ids": [0, 1, 2]},
    ]
    file.write_text("".join(f"{json.dumps(one)}\n" for one in requests))
    trace = hit_rates["Trace"](file, 2, 4)
    (first, ids, answer), (second, more, short) = trace.following(), trace.following()
    assert (first, len(ids), answer) == ("0", 63, 32)
    assert (second, len(more), short) == ("1", 96, 1), "the one of ten blocks is left out"
    assert more[:63] == ids
    assert trace.following() is None


def test_a_turn_of_a_chat_goes_on_from_its_answer(hit_rates):
    chats = hit_rates["Chats"](2, 2, first=10, later=5, answer=3, shared=4)
    (_, ids, _), (_, other, _) = chats.following(), chats.following()
    assert chats.following() is None, "both wait for their answers"
    assert ids[:4] == other[:4]
    assert ids[4:] != other[4:]
    chats.answered("0 0", [7, 8, 9])
    name, more, _ = chats.following()
    assert (name, more[:17], len(more)) == ("0 1", [*ids, 7, 8, 9], 22)
    chats.answered("0 1", [7, 8, 9])
    assert chats.following() is None, "its last turn is answered"
