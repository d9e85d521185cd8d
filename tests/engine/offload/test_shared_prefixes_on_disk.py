"""Common beginnings of a planned batch whose keys and values lie on a disk: read once, and no token changes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.engine.batch_plan import plan_batch
from millpond.engine.engine import Engine
from millpond.engine.outputs import EngineStats
from millpond.engine.request import Request
from millpond.engine.scheduler_request import RequestStatus
from tests.engine.test_offload import N_LAYERS, VOCABULARY, model, options
from tests.engine.test_prefix_cache_full_pool import tree_of_prompts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

#: Three levels that part inside pages, and one that stands alone.
_TREE = tree_of_prompts((85, 50, 20), (2, 2, 2))
PROMPTS = [tuple(3 + token % (VOCABULARY - 3) for token in _TREE[n]) for n in (5, 0, 3, 6, 1, 7, 2, 4)] + [(9,) * 40]


def run(method: str, codec: str, tier: DiskTier | None, *, batch: bool, **more: Any) -> tuple[list[Any], EngineStats]:
    """Tokens of each answer, and figures at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        engine = Engine(model("llama"), **(options(method, codec) | {"max_step_tokens": 64} | more), tier=tier)
        params = mp.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        requests = [Request(request_id=str(n), prompt=text, params=params) for n, text in enumerate(PROMPTS)]
        if batch:
            engine.add_batch(requests)
        else:
            for request in requests:
                engine.add(request)
        done: dict[str, Any] = {}
        while engine.busy:
            done |= {output.request_id: output for output in engine.step() if output.finished}
            engine.check_integrity()
            limit = engine.stats().kv_limit
            assert limit is None or engine.stats().kv_reserved <= limit
    errors = [output.error for output in done.values() if output.error is not None]
    assert not errors
    figures = engine.stats()
    engine.close()
    return [done[str(n)].completions[0].token_ids for n in range(len(PROMPTS))], figures


@pytest.mark.parametrize("method", ["full", "h2o", "snapkv", "kvmerger"])
@pytest.mark.parametrize("layers", [range(N_LAYERS), range(1, N_LAYERS, 2)], ids=["all layers", "some layers"])
def test_common_beginnings_on_a_disk_are_read_once(method: str, layers: range, tmp_path: Path) -> None:
    there, _ = run(method, "auto", None, batch=False)
    tier = DiskTier(tmp_path, layers)
    here, figures = run(method, "auto", tier, batch=True)
    assert here == there
    assert figures.prompt_tokens == plan_batch(PROMPTS).to_read < 0.6 * sum(map(len, PROMPTS))
    assert tier.bytes_used == 0


@pytest.mark.parametrize("codec", ["int4", "kivi4"])
def test_so_are_those_of_answers_in_codes(codec: str, tmp_path: Path) -> None:
    there, _ = run("full", codec, None, batch=False)
    here, figures = run("full", codec, DiskTier(tmp_path, range(N_LAYERS), micro_batch=4), batch=True)
    assert here == there
    assert figures.prompt_tokens == plan_batch(PROMPTS).to_read


def test_a_limit_of_memory_holds_and_the_disk_of_each_is_reserved(tmp_path: Path) -> None:
    there, _ = run("full", "auto", None, batch=False)
    tier = DiskTier(tmp_path, range(N_LAYERS))
    names: set[str] = set()
    reserve = tier.reserve
    tier.reserve = lambda name, n: (names.add(name), reserve(name, n))[1]  # type: ignore[method-assign]
    here, figures = run("full", "auto", tier, batch=True, kv_memory="1MiB")
    assert here == there
    assert figures.prompt_tokens == plan_batch(PROMPTS).to_read
    assert names >= {str(n) for n in range(len(PROMPTS))}
    assert any(name.startswith("shared prefix") for name in names)
    assert not any(tier.has_reserved(name) for name in names)


@pytest.mark.parametrize("method", ["full", "h2o", "kvmerger"])
@pytest.mark.parametrize("layers", [range(N_LAYERS), range(1, N_LAYERS, 2)], ids=["all layers", "some layers"])
@pytest.mark.parametrize("length", [128, 130], ids=["full pages", "a page that is not full"])
def test_a_common_beginning_takes_no_more_than_was_estimated(
    method: str, layers: range, length: int, tmp_path: Path
) -> None:
    tier = DiskTier(tmp_path, layers)
    engine = Engine(model("llama"), **(options(method) | {"max_step_tokens": length // 2}), tier=tier)
    params = mp.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    common = PROMPTS[0][:length]
    engine.add_batch([Request(request_id=str(n), prompt=(*common, 3 + n, 7), params=params) for n in range(2)])
    while not (pinned := engine._requests.with_status(RequestStatus.PINNED)):
        engine.step()
        assert engine.stats().kv_bytes <= engine._scheduler.reserved_bytes
    assert engine.stats().running == 0, "the beginning alone holds pages"
    need = pinned[0].scheduled.memory_need
    assert 0 < engine.stats().kv_bytes <= need.shared
    assert 0 < tier.bytes_used <= need.disk * len(layers)
    while engine.busy:
        engine.step()
    engine.close()
