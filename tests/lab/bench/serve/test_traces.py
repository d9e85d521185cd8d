"""Readers of traces: small files by hand, broken ones, and the published ones where they are at hand."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import DataError
from millpond_lab.bench.serve.requests import TRACES, LoadRequest, Span, TokenBlocks, agents, azure, mooncake, synthetic
from millpond_lab.bench.serve.run import poisson, spread

PUBLISHED = Path(__file__).parents[5] / "shared" / "data" / "traces"

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:47.5000000,30,4\n2023-11-16 18:15:46.2500000,20,1\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_azure_by_hand(tmp_path: Path) -> None:
    first, second = azure(write(tmp_path / "a.csv", AZURE))
    assert (first.at_s, first.prompt.length, first.output_tokens) == (0, 20, 1)
    assert (second.at_s, second.prompt.length, second.output_tokens) == (1.25, 30, 4)
    assert first.prompt.tokens(99, 0)[:10] != second.prompt.tokens(99, 0)[:10]


def test_mooncake_by_hand(tmp_path: Path) -> None:
    """Two prompts whose first two blocks are the same share 1,024 tokens and no more."""
    rows = [
        {"timestamp": 500, "input_length": 1100, "output_length": 9, "hash_ids": [0, 7, 8]},
        {"timestamp": 2500, "input_length": 1536, "output_length": 3, "hash_ids": [0, 7, 9]},
    ]
    one, two = mooncake(write(tmp_path / "m.jsonl", lines(*rows)))
    assert (one.at_s, two.at_s, one.output_tokens) == (0, 2.0, 9)
    a, b = (ask.prompt.tokens(5000, 1) for ask in (one, two))
    assert (len(a), len(b)) == (1100, 1536)
    assert a[:1024] == b[:1024]
    assert a[1024:1040] != b[1024:1040]
    a, b = (ask.shrunk(16).prompt.tokens(5000, 1) for ask in (one, two))
    assert (len(a), len(b)) == (64 + 5, 96)
    assert a[:64] == b[:64]
    assert a[64:] != b[64:69]


def test_agents_by_hand(tmp_path: Path) -> None:
    def row(session: str, at: int, text: str) -> dict[str, object]:
        return {"timestamp": at, "input": text, "output": "0123456789", "session_id": session}

    one = row("a", 5_000_000, "one"), row("a", 6_000_000, ""), row("a", 7_000_000, "one two")
    write(tmp_path / "a.jsonl", lines(*one))
    write(tmp_path / "b.jsonl", lines(row("b", 90_500_000, "uno"), row("b", 91_500_000, "uno due")))
    write(tmp_path / "c.jsonl", "")
    assert agents(tmp_path) == [
        LoadRequest(0, "one", 3, "a"),
        LoadRequest(0, "uno", 3, "b"),
        LoadRequest(1, "uno due", 3, "b"),
        LoadRequest(2, "one two", 3, "a"),
    ]
    assert agents(tmp_path / "a.jsonl") == [LoadRequest(0, "one", 3, "a"), LoadRequest(2, "one two", 3, "a")]


MOONCAKE = {"timestamp": 0, "input_length": 5, "output_length": 9, "hash_ids": [0]}
AGENT = {"timestamp": 0, "input": "a", "output": "b", "session_id": "s"}


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("azure", "", "first line"),
        ("azure", "a,b,c\n1,2,3\n", "first line"),
        ("azure", AZURE[:40], "no requests"),
        ("azure", AZURE + "yesterday,1,2\n", "line 4"),
        ("azure", AZURE + "2023-11-16 18:15:46.25,0,2\n", "of 0 tokens"),
        ("azure", AZURE + "2023-11-16 18:15:46.25,7\n", "line 4"),
        ("azure", AZURE + "\0", "zero bytes"),
        ("mooncake", "", "no requests"),
        ("mooncake", "{", "line 1"),
        ("mooncake", "[]", "line 1"),
        ("mooncake", lines(MOONCAKE, {"timestamp": 3}), "line 2: there is no field 'hash_ids'"),
        ("mooncake", lines(MOONCAKE | {"hash_ids": [0, 1]}), "do not cover 5 tokens"),
        ("mooncake", lines(MOONCAKE | {"hash_ids": []}), "do not cover"),
        ("mooncake", lines(MOONCAKE | {"hash_ids": [-1]}), "negative"),
        ("mooncake", lines(MOONCAKE | {"hash_ids": ["x"]}), "line 1"),
        ("mooncake", lines(MOONCAKE | {"timestamp": "now"}), "line 1"),
        ("mooncake", lines(MOONCAKE | {"timestamp": float("nan")}), "a time of nan"),
        ("agents", lines({"input": "x"}), "line 1: there is no field 'output'"),
        ("agents", lines(AGENT | {"output": 7}), "line 1"),
    ],
)
def test_broken_files_are_refused_with_their_line(kind: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        TRACES[kind](write(tmp_path / "trace", text))


@pytest.mark.parametrize("read", TRACES.values())
def test_no_file_and_no_text(read: Callable[[Path], list[LoadRequest]], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DataError, match="UTF-8"):
        read(tmp_path / "bytes")


def test_a_folder_without_traces(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.jsonl files in"):
        agents(tmp_path)


@given(n=st.integers(1, 30), low=st.integers(2, 50), more=st.integers(0, 50), data=st.data())
def test_made_up_loads(n: int, low: int, more: int, data: st.DataObject) -> None:
    shared, seed = data.draw(st.integers(0, low - 1)), data.draw(st.integers(0, 99))
    asks = synthetic(n, Span(low, low + more), Span(1, 3), shared, seed)
    prompts = [ask.prompt.tokens(10**6, seed) for ask in asks]
    assert all(low <= len(tokens) <= low + more for tokens in prompts)
    assert len({tuple(tokens[:shared]) for tokens in prompts}) == 1
    assert len({tuple(tokens) for tokens in prompts}) == n
    assert asks == synthetic(n, Span(low, low + more), Span(1, 3), shared, seed)


@given(
    parts=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=5), times=st.integers(1, 9)
)
def test_shrinking_keeps_what_is_shared(parts: list[tuple[int, int]], times: int) -> None:
    prompt = TokenBlocks(tuple(parts))
    short = prompt.shrunk(times)
    assert [name for name, _ in short.parts] == [name for name, _ in parts]
    assert prompt.length <= times * short.length
    assert len(short.tokens(7, 0)) == short.length


def test_poisson_arrivals() -> None:
    """Gaps of an exponential distribution: mean and deviation are the same; 5,000 of them, to 5 %."""
    times = poisson(5001, 4.0, seed=1)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)


def test_percentiles() -> None:
    assert spread([None, *range(101)]) == {"mean": 50, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert spread([None]) is None


class TestPublished:
    """The facts that the sources of the traces state."""

    @pytest.fixture(autouse=True)
    def _needs_the_files(self) -> None:
        if not PUBLISHED.is_dir():
            pytest.skip("the published traces are not at hand")

    @pytest.mark.parametrize(("name", "n"), [("azure2023_conv.csv", 19_366), ("azure2023_code.csv", 8_819)])
    def test_azure(self, name: str, n: int) -> None:
        asks = azure(PUBLISHED / name)
        assert len(asks) == n
        assert 3400 < asks[-1].at_s < 3700  # an hour

    def test_mooncake(self) -> None:
        """A cache without end finds 36.6 % of all blocks."""
        asks = mooncake(PUBLISHED / "mooncake_conversation.jsonl")
        seen: set[int] = set()
        hits = total = 0
        for ask in asks:
            names = [name for name, _ in ask.prompt.parts]
            hits += sum(name in seen for name in names)
            total += len(names)
            seen.update(names)
        assert len(asks) == 12_031
        assert hits / total == pytest.approx(0.366, abs=0.002)

    def test_agents(self) -> None:
        asks = agents(PUBLISHED / "lmcache_agent")
        assert len(asks) == 565 + 132 + 471 - 43  # lines without a prompt
        assert len({ask.session for ask in asks}) == 19 + 11 + 24  # one file is empty
