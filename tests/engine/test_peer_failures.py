"""What users reported of other engines' stored and shared caches, each named after what failed there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.sessions.reuse import SessionReuse
from millpond.errors import DataError
from tests.helpers.engine.helpers import engine_for, greedy, prompt, tokens
from tests.helpers.engine.sessions import NEW, ask, kv, open_engine, said, stored, words

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_restored_but_empty(tmp_path: Path) -> None:
    """A restore that reports success holds the entries that it reports, and answers like the cache that was stored."""
    ids = words(60, 0)
    first = open_engine(tmp_path)
    output = ask(first, ids)
    ids += said(output)
    held = kv(output).held
    expected = said(ask(first, ids + words(9, 1)))
    first.close()
    again = open_engine(tmp_path)
    restored = ask(again, ids + words(9, 1), new=1)
    assert kv(restored).restored_tokens == len(ids) - 1
    assert held > 0
    assert kv(restored).held >= held // 2, "budgets of 50 %: what was held, and its share of what is new"
    assert said(ask(again, ids + words(9, 1))) == expected
    again.close()


def test_an_earlier_failed_restore_poisons_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore that breaks off half-way leaves no pages, no turn that fails again, and no other answer."""
    engine, plain = open_engine(tmp_path), open_engine(None)
    ids = words(60, 0)
    ids += said(ask(engine, ids)) + words(9, 1)
    true, calls = SessionReuse._fill, []

    def half(reuse: SessionReuse, state: Any, turn: Any) -> None:
        calls.append(state)
        true(reuse, state, turn)
        state.private_cache.clear()
        state.private_cache = None
        raise DataError("it broke off")

    with monkeypatch.context() as patch:
        patch.setattr(SessionReuse, "_fill", half)
        output = ask(engine, ids)  # checks that every page is held by who names it
    assert calls
    assert kv(output).restored_tokens == 0
    assert said(output) == said(ask(plain, ids))
    later = ids + said(output) + words(5, 2)
    assert kv(ask(engine, later)).restored_tokens == len(ids) + NEW - 1, "the next restore works"
    engine.close()
    plain.close()


def test_one_entry_larger_than_the_limit(tmp_path: Path) -> None:
    """It is not stored; it evicts nothing, stops nothing, and smaller ones are stored before and after it."""
    engine = open_engine(tmp_path, "full", cache_disk=120_000)
    small, large = words(30, 0), words(240, 1)
    small += said(ask(engine, small)) + words(5, 2)
    (file,) = stored(tmp_path)
    assert said(ask(engine, large))
    assert stored(tmp_path) == [file]
    assert kv(ask(engine, small)).restored_tokens == len(small) - 6
    assert len(stored(tmp_path)) == 2
    stats = engine.stats().sessions
    assert stats is not None
    assert (stats.dropped, stats.evicted) == (1, 0)
    engine.close()


@pytest.mark.parametrize("options", [{"cache_dir": True}, {"prefix_cache": True}], ids=["sessions", "prefix cache"])
def test_first_answer_differs_from_the_second(options: dict[str, Any], tmp_path: Path) -> None:
    """The same request says the same when it finds what its first run has left."""
    folder = tmp_path if options.pop("cache_dir", False) else None
    engine = open_engine(folder, "snapkv", **options)
    ids = words(64, 0)
    if folder is not None:
        ids += said(ask(engine, ids)) + words(9, 1)
    found = [ask(engine, ids) for _ in range(3)]
    assert said(found[0]) == said(found[1]) == said(found[2])
    if folder is None:
        assert kv(found[1]).held == kv(found[0]).held
        assert engine.stats().shared_tokens > 0, "the second run found something"
    else:
        assert kv(found[2]).restored_tokens == kv(found[0]).restored_tokens > 0
    engine.close()


@pytest.mark.parametrize("method", ["h2o", "snapkv", "streaming"])
def test_length_after_eviction_makes_the_prompt_read_again(method: str, tmp_path: Path) -> None:
    """A turn counts by the tokens that were read, not by the entries that stayed: only new tokens are read."""
    engine = open_engine(tmp_path, method)
    ids, read = words(80, 0), 0
    for turn in range(3):
        output = ask(engine, ids)
        assert engine.stats().prompt_tokens == read + len(ids) - kv(output).restored_tokens
        assert kv(output).restored_tokens == (0 if turn == 0 else len(ids) - 10)
        assert kv(output).held < kv(output).seen, "entries were evicted"
        read = engine.stats().prompt_tokens
        ids += said(output) + words(9, 1 + turn)
    engine.close()


@pytest.mark.parametrize(
    "bad",
    [
        {"params": mp.SamplingParams(max_tokens=4, logit_bias={10**6: 1.0})},
        {"prompt": (10**6, 1, 2)},
        {"prompt": ()},
        {"marks": mp.PromptMarks(keep=((0, 10**6),))},
    ],
    ids=["bias of no token", "no token", "no prompt", "a span beyond the prompt"],
)
def test_one_clients_field_stops_everybody(bad: dict[str, Any]) -> None:
    """A value that cannot be obeyed refuses its own request; those in flight get the answers that they get alone."""
    alone, engine = engine_for(), engine_for()
    alone.add(Request(request_id="x", prompt=prompt(40), params=greedy()))
    (expected,) = alone.drain()
    engine.add(Request(request_id="x", prompt=prompt(40), params=greedy()))
    engine.step()
    with pytest.raises(mp.MillpondError):
        engine.add(Request(**{"request_id": "bad", "prompt": prompt(31), "params": greedy()} | bad))
    (output,) = engine.drain()
    assert tokens(output) == tokens(expected)
    assert output.error is None
    for one in (alone, engine):
        one.check_integrity()
        one.close()


def test_a_preempted_request_that_is_preempted_forever() -> None:
    """In a pool that is promised several times, every request ends, within a bounded number of preemptions."""
    expected = {}
    for length in (40, 57, 31, 45):
        alone = engine_for("full", family="llama")
        alone.add(Request(request_id=str(length), prompt=prompt(length), params=greedy(24)))
        expected |= {output.request_id: tokens(output) for output in alone.drain()}
        alone.close()
    engine = engine_for("full", kv_memory=_bytes_of(90), overcommit=4.0)
    for length in (40, 57, 31, 45):
        engine.add(Request(request_id=str(length), prompt=prompt(length), params=greedy(24)))
    done: dict[str, Any] = {}
    for _ in range(600):
        done |= {output.request_id: output for output in engine.step() if output.finished}
        if not engine.busy:
            break
    assert {name: tokens(output) for name, output in done.items()} == expected
    assert 0 < engine.stats().preemptions <= 8, "each is preempted a few times at most"
    engine.close()


def _bytes_of(entries: int) -> int:
    """Bytes that a sequence of so many entries holds at most."""
    engine = engine_for("full")
    engine.add(Request(request_id="x", prompt=prompt(57), params=greedy(entries - 57)))
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine.stats().kv_bytes)
    engine.close()
    return most


def test_pinned_entries_that_stall_eviction() -> None:
    """Blocks that a running request holds stay, and those behind them leave: a new prompt finds room meanwhile."""
    engine = engine_for("full", kv_memory=_bytes_of(200), prefix_cache=True)
    engine.add(Request(request_id="holds", prompt=prompt(40), params=greedy(100)))
    for _ in range(6):
        engine.step()
    done: dict[str, Any] = {}
    for length in range(45, 57):
        engine.add(Request(request_id=str(length), prompt=prompt(length), params=greedy(2)))
        for _ in range(40):
            done |= {output.request_id: output for output in engine.step() if output.finished}
            engine.check_integrity()
            if str(length) in done:
                break
    others = [done[str(length)] for length in range(45, 57)]
    assert all(output.error is None and len(tokens(output)) == 2 for output in others)
    stats: Engine = engine
    assert stats.stats().prefix is not None
    assert stats.stats().prefix.evicted > 0
    assert stats.stats().preemptions == 0, "no request made way for entries that only others might want"
    assert len(engine.drain()) + ("holds" in done) == 1
    engine.close()
