"""What the engine tells of its caches: against the caches themselves."""

from __future__ import annotations

import pytest

from millpond.engine.engine import Engine
from millpond.engine.outputs import CacheSnapshot
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import OptionError
from tests.helpers.evals.small import tiny_model

N_LAYERS, PROMPT = 2, tuple(2 + 7 * i % 90 for i in range(40))


def engine(**options: object) -> Engine:
    return Engine(tiny_model(), page_slots=8, max_step_tokens=16, **options)  # type: ignore[arg-type]


def request(
    name: str, method: str = "h2o", new: int = 12, watch: bool = False, n: int = 1, client: str = ""
) -> Request:
    params = SamplingParams(max_tokens=new, temperature=0, n=n, ignore_eos=True)
    cache = CacheOptions(method=method, budget=None if method == "full" else "30%")
    return Request(request_id=name, prompt=PROMPT, params=params, cache=cache, watch=watch, client=client)


def of_the_cache(made: Engine, name: str, layer: int) -> tuple[list[float], list[float | None]]:
    """Shares and mean scores, entry by entry."""
    found = made.cache_of(name)
    assert found is not None
    batch_cache, sequence = found
    entries = batch_cache.layers[layer].read(sequence)
    seen, heads = int(batch_cache.tracker.seen[sequence]), entries.positions.shape[0]
    scores: list[list[float]] = [[] for _ in range(seen)]
    for row, values in zip(entries.positions.tolist(), entries.scores.tolist(), strict=True):
        for position, score in zip(row, values, strict=True):
            if position >= 0:
                scores[position].append(score)
    return [len(own) / heads for own in scores], [sum(own) / len(own) if own else None for own in scores]


def known(made: Engine, name: str, layer: int) -> CacheSnapshot:
    memory = made.memory(name, layer)
    assert memory is not None
    return memory


@pytest.mark.parametrize("method", ["full", "h2o", "tova", "window"])
def test_it_is_what_the_cache_holds_at_every_step(method: str) -> None:
    made = engine()
    made.add(request("other", new=9))
    made.add(request("mine", method))
    looked = 0
    while made.busy:
        made.step()
        if made.cache_of("mine") is None:
            continue
        for layer in range(N_LAYERS):
            memory = known(made, "mine", layer)
            kept, scores = of_the_cache(made, "mine", layer)
            assert list(memory.kept) == pytest.approx(kept)
            assert [score is None for score in memory.scores] == [score is None for score in scores]
            told = [score for score in memory.scores if score is not None]
            assert told == pytest.approx([score for score in scores if score is not None], rel=1e-5)
            assert (memory.layer, memory.n_layers, memory.n_kv_heads) == (layer, N_LAYERS, 2)
            assert memory.token_ids[: len(PROMPT)] == PROMPT[: len(memory.token_ids)]
            looked += 1
    assert looked > 2 * 10
    assert made.memory("mine", 0) is None  # it is over, and nobody watched
    made.close()


@pytest.mark.parametrize("n", [1, 2])
def test_a_watched_request_is_known_when_it_is_over(n: int) -> None:
    made = engine()
    made.add(request("mine", watch=True, n=n))
    (done,) = [output for output in made.drain() if output.finished]
    memory = known(made, "mine", 1)
    answer = done.completions[0]
    assert memory.token_ids == (*PROMPT, *answer.token_ids[:-1])  # the last one was never read
    assert memory.kv == answer.kv
    assert sum(memory.kept) == pytest.approx(memory.kv.held, rel=0.2)
    assert min(memory.kept) == 0
    assert made.stats().kv_bytes == 0
    made.close()


def test_a_cancelled_request_is_known_too() -> None:
    made = engine()
    made.add(request("mine", watch=True, new=30))
    for _ in range(6):
        made.step()
    now = known(made, "mine", 0)
    made.cancel("mine")
    assert known(made, "mine", 0) == now
    made.drain()
    made.close()


def test_only_the_last_ones_are_known() -> None:
    made = engine()
    for number in range(12):
        made.add(request(str(number), new=2, watch=True))
        made.drain()
    found = [made.memory(str(number), 0) is not None for number in range(12)]
    assert found == [False] * 4 + [True] * 8
    made.close()


def test_a_layer_that_is_not_there() -> None:
    made = engine()
    made.add(request("mine", watch=True, new=4))
    made.step()
    for layer in (-1, N_LAYERS):
        with pytest.raises(OptionError, match="layers 0 to 1"):
            made.memory("mine", layer)
    made.drain()
    with pytest.raises(OptionError, match="layers 0 to 1"):
        made.memory("mine", N_LAYERS)
    assert made.memory("nobody", 0) is None
    made.close()


def test_only_its_client_sees_it() -> None:
    made = engine()
    made.add(request("mine", watch=True, new=6, client="me"))

    def seen_by(client: str | None, layer: int = 0) -> CacheSnapshot | None:
        return made.memory("mine", layer, client)

    for _ in range(4):
        made.step()
    for _ in range(2):  # while it runs, and behind its end
        assert seen_by("me") == seen_by(None) is not None
        assert seen_by("you") is None
        assert seen_by("you", N_LAYERS) is None, "not even that there is no such layer"
        assert seen_by("") is None
        made.drain()
    made.close()
