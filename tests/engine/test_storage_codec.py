"""The storage codec of an engine: what it refuses, and the samples of prompts that it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.codec.transform.exact_tokens import FAR, QUERY_STEP, SINKS, attention_per_query, most_attended_of_units
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.errors import CacheMismatchError, DataError, OptionError
from tests.helpers.hf.transform import ids, tiny, transform_of_tiny

CODEC = "transform:1.5"


def engine_of(kind: str = "gqa", **options: Any) -> Engine:
    given = {"method": "full", "codec": "auto", "max_step_tokens": 100, "calibration": transform_of_tiny(kind)}
    return Engine(tiny(kind), storage_codec=CODEC, **(given | options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage_codec": "zip"}, "transform:BITS"),
        ({"storage_codec": "transform:9"}, "0.5 to 4 bits"),
        ({"page_slots": 16}, "multiple of 32"),
        ({"method": "cam"}, "'cam'"),
        ({"method": "d2o"}, "'d2o'"),
        ({"method": "kvmerger"}, "'kvmerger'"),
        ({"method": "ems"}, "'ems'"),
        ({"overflow": "rolling"}, "rolling|other positions"),
        ({"codec": "kvquant4"}, "kvquant4"),
    ],
)
def test_settings_that_have_no_codes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        EngineConfig(**({"storage_codec": CODEC} | options))


def test_prompts_are_kept() -> None:
    assert EngineConfig(storage_codec=CODEC).prefix_cache is True
    assert EngineConfig(storage_codec=CODEC, prefix_cache=False).prefix_cache is False
    assert EngineConfig(storage_codec=CODEC, prefix_cache="craft").prefix_cache == "craft"
    assert EngineConfig().prefix_cache == "live"


def test_the_transform_file_is_checked(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"millpond calibrate .*--codec transform --out NAME.safetensors.*minutes"):
        engine_of(calibration=None)
    with pytest.raises(DataError, match="cannot be read"):
        engine_of(calibration=tmp_path / "none.safetensors")
    with pytest.raises(CacheMismatchError, match="another model"):
        engine_of(calibration=transform_of_tiny("biases"))
    given = transform_of_tiny("gqa")
    small = replace(given, calibrated=replace(given.calibrated, most_bits=1.25))
    with pytest.raises(OptionError, match=r"up to 1\.25 bits"):
        engine_of(calibration=small)
    with pytest.raises(OptionError, match="storage_codec"):
        Engine(tiny("gqa"), calibration=transform_of_tiny("gqa"))


def samples_of(engine: Engine, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Which tokens of prompts that are read together are exact, (layers, n) each."""
    states = []
    for number, prompt in enumerate(prompts):
        engine.add(Request(request_id=f"{number}", prompt=prompt, params=mp.SamplingParams(max_tokens=3)))
        states.append(engine._parts.requests[f"{number}"])
    engine.drain()
    found = []
    for state in states:
        assert state.samples is not None
        assert state.samples.n == len(state.ids)
        found.append(state.samples.exact())
    return found


@torch.no_grad()
def by_whole_text(kind: str, prompt: list[int]) -> torch.Tensor:
    """The same by a pass over the whole text."""
    model = tiny(kind)
    seen: dict[int, torch.Tensor] = {}
    with mp.compress(model, "full") as cache:

        def sample(number: int, q: Any, k: Any, v: Any, mask: Any, shape: Any) -> None:
            at = torch.arange(QUERY_STEP - 1, len(prompt), QUERY_STEP)
            attention = attention_per_query(q[0][:, at], at, k[0], shape, least=FAR)
            attention[:SINKS] = 0
            seen[number] = most_attended_of_units(attention)
            seen[number][:SINKS] = True

        cache.watch(sample)
        model(torch.tensor([prompt]), cache=cache)
    return torch.stack([seen[number] for number in sorted(seen)])


@pytest.mark.parametrize("kind", ["gqa", "sliding"])
@pytest.mark.parametrize("options", [{}, {"native_layers": False, "runner": "modules"}, {"method": "h2o"}])
def test_every_way_of_reading_a_prompt_is_sampled(kind: str, options: dict[str, Any]) -> None:
    prompts = [ids(n, seed).tolist() for n, seed in ((310, 3), (290, 4))]
    engine = engine_of(kind, prefix_cache=False, **options)
    for prompt, exact in zip(prompts, samples_of(engine, prompts), strict=True):
        reference = by_whole_text(kind, prompt)
        assert float((exact == reference).float().mean()) > 0.998
        assert int(exact.sum()) > len(exact) * SINKS
    engine.close()


def test_no_samples_without_a_codec() -> None:
    engine = Engine(tiny("gqa"), method="full")
    engine.add(Request(request_id="0", prompt=ids(40).tolist(), params=mp.SamplingParams(max_tokens=2)))
    state = engine._parts.requests["0"]
    engine.drain()
    assert state.samples is None
    engine.close()
