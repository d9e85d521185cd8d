"""An answer has the same bits whatever runs with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.engine.config import PROMPT_BLOCK, EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.scheduler import Scheduler
from millpond.engine.scheduler_request import MemoryNeed, SchedulerRequest
from millpond.errors import OptionError, UnsupportedModelError
from millpond.kernels import native
from tests.helpers.engine.helpers import finish
from tests.helpers.hf.families import family, text

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")

#: Lengths of prompts: of one block or two, a tail of a few rows, and more sequences than a kernel of few rows takes.
LENGTHS = (5, 300, 262, 513, 40, 90, *range(31, 66))
#: Of them, those that are compared: the first ones.
COMPARED = 5
BEGINNING = 2 * PROMPT_BLOCK


@cache
def model(dtype: torch.dtype) -> Any:
    return family("llama").make(head_dim=32, hidden_size=64, max_position_embeddings=800).to(dtype)


def requests() -> list[Request]:
    """Greedy and seeded ones; the first ones begin alike, as far as they are long."""
    same = text(1, BEGINNING, seed=1)[0].tolist()
    found = []
    for number, length in enumerate(LENGTHS):
        own = text(1, length, seed=length)[0].tolist()
        ids = (same[: length - 5] + own[-5:])[-length:] if number < COMPARED else own
        params = mp.SamplingParams(max_tokens=9, temperature=number % 2 * 1.0, seed=number, logprobs=2, ignore_eos=True)
        found.append(Request(request_id=str(number), prompt=tuple(ids), params=params))
    return found


def answers(
    asked: Sequence[Request], *, twice: bool = False, method: str = "full", dtype: Any = torch.bfloat16, **options: Any
) -> dict[str, Any]:
    """Tokens and log probabilities; `twice`: of the second time."""
    budget = None if method == "full" else "40%"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        engine = Engine(model(dtype), method=method, budget=budget, deterministic=True, **options)
        for _ in range(1 + twice):
            for request in asked:
                engine.add(request)
            done = finish(engine) if engine.config.prefix_cache is False else {o.request_id: o for o in engine.drain()}
    found = {
        name: [(one.token_id, one.logprob, one.top) for one in output.completions[0].logprobs or ()]
        for name, output in done.items()
    }
    assert all(len(one) == 9 for one in found.values())
    preempted = engine.stats().preemptions
    assert (preempted > 0) is ("kv_memory" in options)
    if twice:
        assert engine.stats().shared_tokens >= BEGINNING
    engine.close()
    return found


@cache
def alone(method: str, dtype: torch.dtype, codec: str | None = None) -> dict[str, Any]:
    found = {}
    for request in requests()[:COMPARED]:
        found |= answers([request], method=method, dtype=dtype, codec=codec)
    return found


def same(found: dict[str, Any], method: str, dtype: torch.dtype, codec: str | None = None) -> None:
    expected = alone(method, dtype, codec)
    assert {name: found[name] for name in expected} == expected


OTHERS = [("full", torch.bfloat16, None), ("snapkv", torch.float32, None)]
CASES = [
    ("full", torch.float32, None),
    ("h2o", torch.float32, None),
    *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS),
    ("streaming", torch.bfloat16, None),
    ("h2o", torch.bfloat16, "int4"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{str(case[1])[6:]}-{case[2]}")
def test_whatever_runs_beside_it(case: tuple[str, torch.dtype, str | None]) -> None:
    method, dtype, codec = case
    same(answers(requests(), method=method, dtype=dtype, codec=codec), *case)
    same(answers(requests()[::-1], method=method, dtype=dtype, codec=codec, max_step_tokens=256), *case)


def test_whatever_is_shared() -> None:
    case = ("full", torch.float32)
    few = requests()[: COMPARED + 3]
    same(answers(few, twice=True, prefix_cache=True, dtype=torch.float32), *case)
    options = {"max_step_tokens": 700, "page_slots": 64}
    same(answers(few[::-1], twice=True, prefix_cache=True, dtype=torch.float32, **options), *case)


def test_whoever_is_preempted() -> None:
    same(answers(requests(), kv_memory="1400KiB", overcommit=3.0, dtype=torch.float32), "full", torch.float32)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("method", ["full", "h2o"])
def test_whatever_the_threads(method: str) -> None:
    expected = alone(method, torch.float32)
    same(answers(requests(), method=method, dtype=torch.float32), method, torch.float32)
    assert answers(requests()[1:2], method=method, dtype=torch.float32)["1"] == expected["1"]


def test_packed_weights_too() -> None:
    small = {"weights": "int8", "deterministic": True, "method": "full"}
    shape = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 800}
    loaded = [family("llama").make(**shape) for _ in range(2)]
    found = []
    for own, some in zip(loaded, (requests()[1:2], requests()[:12]), strict=True):
        engine = Engine(own, **small)  # type: ignore[arg-type]
        for request in some:
            engine.add(request)
        found.append([(o.token_id, o.logprob) for o in finish(engine)["1"].completions[0].logprobs or ()])
        engine.close()
    assert found[0] == found[1]


def test_prompts_are_cut_at_blocks_alone() -> None:
    scheduler = Scheduler(None, step_tokens=300, prompt_block=256)
    scheduled = [SchedulerRequest(str(n), length, MemoryNeed(1, 0, 1)) for n, length in enumerate((600, 100, 270))]
    for one in scheduled:
        scheduler.add(one)
    cuts: dict[str, list[int]] = {one.key: [] for one in scheduled}
    while any(one.num_computed_tokens < one.num_prompt_tokens for one in scheduled):
        step = scheduler.plan()
        assert step.prefills
        assert sum(n for _, n in step.prefills) <= 300
        for one, n in step.prefills:
            cuts[one.key].append(n)
            scheduler.add_computed_tokens(one, n)
    assert cuts == {"0": [256, 256, 88], "1": [100], "2": [256, 14]}


def test_what_moves_bits_is_refused(tmp_path: Any) -> None:
    with pytest.raises(OptionError, match="max_step_tokens=255 must be at least 256"):
        EngineConfig(deterministic=True, max_step_tokens=255)
    with pytest.raises(OptionError, match="runner='modules'"):
        EngineConfig(deterministic=True, runner="modules")
    with pytest.raises(OptionError, match="chunk_store="):
        EngineConfig(deterministic=True, chunk_store=mp.ChunkStore(tmp_path))
    with pytest.raises(OptionError, match="cache_dir="):
        EngineConfig(deterministic=True, cache_dir=tmp_path)
    engine = Engine(model(torch.float32), deterministic=True)
    with pytest.raises(OptionError, match="planned batch"):
        engine.add_batch(requests()[:2])
    engine.close()


def test_models_and_kernels_that_cannot_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match="deterministic=True needs a model that runs without its modules"):
        Engine(family("gemma2").make(), deterministic=True)
    monkeypatch.setenv("MILLPOND_KERNELS", "reference")
    with pytest.raises(UnsupportedModelError, match="needs the native kernels"):
        Engine(model(torch.float32), deterministic=True)


def test_hooks_end_it() -> None:
    own = family("llama").make(head_dim=32, hidden_size=64, max_position_embeddings=800)
    engine = Engine(own, deterministic=True)
    engine.add(requests()[0])
    hook = own.model.layers[0].register_forward_hook(lambda *args: None)
    (output,) = engine.step()
    assert isinstance(output.error, UnsupportedModelError)
    assert "remove the hooks" in str(output.error)
    hook.remove()
    engine.close()
