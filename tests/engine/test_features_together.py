"""Features of the engine that meet: what goes together gives the tokens of each alone, what does not is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError
from millpond.prompt_marks import PromptMarks
from tests.helpers.engine.helpers import add, greedy
from tests.helpers.hf.families import family, text

SPANS = ((4, 9),)


def model(**more: Any) -> Any:
    return family("llama").make(head_dim=32, hidden_size=64, **{"max_position_embeddings": 800, **more})


def request(name: str, length: int, *, begins: int = 0, **rest: Any) -> Request:
    """Of `length` tokens, the first `begins` of which others have too."""
    same, own = text(1, 700, seed=1)[0].tolist(), text(1, length, seed=length)[0].tolist()
    params = mp.SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)
    return Request(request_id=name, prompt=tuple(same[:begins] + own[begins:]), params=params, **rest)


def logprobs(engine: Engine, *requests: Request) -> dict[str, list[tuple[int, float]]]:
    add(engine, *requests)
    found: dict[str, list[tuple[int, float]]] = {}
    while engine.busy:
        for output in engine.step():
            if output.finished:
                assert output.error is None
                each = output.completions[0].logprobs or ()
                found[output.request_id] = [(one.token_id, one.logprob) for one in each]
        engine.check_integrity()
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_kept_spans_are_refused_where_positions_move_or_formats_age() -> None:
    asked = Request(request_id="kept", prompt=tuple(range(5, 60)), params=greedy(), marks=PromptMarks(keep=SPANS))
    rolling = Engine(model(), method="h2o", budget=32, overflow="rolling", options={"positions": "cache_relative"})
    with pytest.raises(OptionError, match="overflow='rolling' moves positions"):
        rolling.add(asked)
    rolling.close()
    aging = Engine(model(), method="h2o", budget=32, codec="bf16:50%,int8:25%,int4")
    with pytest.raises(OptionError, match="number formats by age"):
        aging.add(asked)
    aging.close()
    cache = mp.compress(model(), "h2o", 32, codec="bf16:50%,int8:25%,int4")
    with pytest.raises(OptionError, match="number formats by age"):
        cache.protect(SPANS)


def test_formats_by_age_are_refused_where_positions_move() -> None:
    with pytest.raises(OptionError, match="formats by age"):
        Engine(model(), method="streaming", budget=32, overflow="rolling", codec="bf16:50%,int8:25%,int4")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_caches_with_kept_spans_are_not_stored(tmp_path: Path) -> None:
    engine = Engine(model(), method="h2o", budget=32, cache_dir=tmp_path)
    first = logprobs(engine, request("kept", 60, marks=PromptMarks(keep=SPANS)))["kept"]
    assert engine.sessions is not None
    assert engine.sessions.wait(60)
    assert engine.stats().sessions.stored == 0  # type: ignore[union-attr]
    logprobs(engine, request("plain", 60))
    assert engine.sessions.wait(60)
    assert engine.stats().sessions.stored == 1  # type: ignore[union-attr]
    later = tuple(text(1, 60, seed=60)[0].tolist()) + tuple(one for one, _ in first) + tuple(range(7, 20))
    logprobs(engine, Request(request_id="later", prompt=later, params=greedy(), marks=PromptMarks(keep=SPANS)))
    assert engine.stats().restored_tokens == 0
    engine.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sums_at_breakpoints_beside_a_disk_of_blocks(tmp_path: Path) -> None:
    asked = [request(str(n), 150 + n, begins=128, marks=PromptMarks(breakpoints=(128,))) for n in range(3)]
    others = [request(f"other {n}", 160 + 40 * n) for n in range(4)]
    plain = [request(f"full {n}", 150 + n, begins=128, cache=CacheOptions(method="full")) for n in range(3)]
    alone = Engine(model(), method="h2o", budget=48)
    expected = {}
    for one in (*asked, *others, *plain):
        expected |= logprobs(alone, one)
    alone.close()
    engine = Engine(
        model(),
        method="h2o",
        budget=48,
        prefix_cache=True,
        prefix_disk="2MiB",
        prefix_folder=tmp_path,
        kv_memory="400KiB",
    )
    for one in (*asked, *others, *asked[::-1], *plain, *others, *plain[::-1], *asked):
        found = logprobs(engine, one)
        assert [token for token, _ in found[one.request_id]] == [token for token, _ in expected[one.request_id]]
    stats = engine.stats()
    assert stats.prefix is not None
    assert stats.prefix.evicted
    assert stats.prefix.returned
    assert stats.shared_tokens >= 2 * 128
    engine.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_breakpoints_and_a_disk_move_no_bits_of_a_deterministic_engine(tmp_path: Path) -> None:
    asked = [request(str(n), 560 + n, begins=540, marks=PromptMarks(breakpoints=(520, 300))) for n in range(3)]
    plain = [request(f"full {n}", 560 + n, begins=540, cache=CacheOptions(method="full")) for n in range(3)]
    others = [request(f"other {n}", 500 + 40 * n) for n in range(3)]
    own = model()
    alone = Engine(own, method="h2o", budget=48, deterministic=True)
    expected = {}
    for one in (*asked, *plain, *others):
        expected |= logprobs(alone, one)
    alone.close()
    engine = Engine(
        own,
        method="h2o",
        budget=48,
        deterministic=True,
        prefix_cache=True,
        prefix_disk="4MiB",
        prefix_folder=tmp_path,
        kv_memory="1300KiB",
    )
    for one in (*asked, *others, *plain, *asked, *others, *plain):
        assert logprobs(engine, one)[one.request_id] == expected[one.request_id]
    assert engine.stats().shared_tokens > 0
    assert engine.stats().shared_tokens % 256 == 0
    engine.close()
