"""Requests of methods that evict move in codes: the same entries at the same places, and close answers."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from millpond.cache.coded import kept_coder
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions
from millpond.engine.transfer.container import pack, unpack
from millpond.engine.transfer.request_snapshot import CODED, FORMAT
from millpond.errors import CacheMismatchError, DataError
from millpond.hf.calibration.transform import calibrate_transform
from tests.helpers.engine.coded import agreement, answer, asked, engine_of, first_choices, prompt, run
from tests.helpers.engine.evicted import EVICTING, held, state_of
from tests.helpers.hf.transform import ids, tiny, transform_of_tiny

N, NEW = 460, 40


def exported(engine: Engine, request: Any, at: int = 3) -> tuple[bytes, list[dict[str, Tensor]]]:
    """The bytes of a request, and what its first answer held."""
    engine.add(request)
    run(engine, at)
    before = held(engine, request.request_id)
    data = engine.export_request(request.request_id)
    assert engine.stats().kv_bytes == 0
    return data, before


@pytest.mark.parametrize("method", EVICTING)
def test_an_answer_goes_on_elsewhere_with_what_was_kept(method: str) -> None:
    options = EVICTING[method]
    first, second, plain = engine_of(**options), engine_of(**options), engine_of(storage_codec=None, **options)
    plain.add(asked("alone", prompt(N, 3), NEW))
    expected = answer(run(plain)["alone"])
    data, before = exported(first, asked("moved", prompt(N, 3), NEW, known=expected))
    raw, _ = exported(plain, asked("moved", prompt(N, 3), NEW, known=expected))
    assert (unpack(data)[0]["format"], unpack(raw)[0]["format"]) == (CODED, FORMAT)
    assert len(data) < 0.6 * len(raw)
    name = second.import_request(data)
    second.check_integrity()
    for one, other in zip(before, held(second, name), strict=True):
        assert one.keys() == other.keys()
        assert not torch.equal(one["keys"], other["keys"])
        for part in one.keys() - {"keys", "values"}:
            assert torch.equal(one[part], other[part]), part
    output = run(second)[name]
    assert agreement(first_choices(output), expected) >= 0.94
    assert answer(output) == expected
    kv = output.completions[0].kv
    assert kv is not None
    assert (kv.decoded_tokens, kv.exact) == (N, False)
    for engine in (first, second, plain):
        engine.close()


def test_codes_that_travel_on_are_the_same_codes() -> None:
    """Entries that were decoded get the codes that they came from, whatever was decoded since."""
    options = EVICTING["snapkv"]
    first, second = engine_of(**options), engine_of(**options)
    data, _ = exported(first, asked("moved", prompt(N, 3), 60))
    second.import_request(data)
    one = held(second, "moved")
    run(second, 40)
    again = second.export_request("moved")
    first.import_request(again)
    for before, after in zip(one, held(first, "moved"), strict=True):
        for side in ("keys", "values"):
            n = before[side].shape[1] - 95  # the newest were exact, and are in pages now
            assert torch.allclose(after[side][:, :n], before[side][:, :n], atol=1e-4)
    headers = [unpack(each)[1]["cache.0.0.codes.headers"] for each in (data, again)]
    assert torch.equal(*headers)
    first.close()
    second.close()


def test_attended_tokens_are_exact_and_stay_so() -> None:
    options = EVICTING["h2o"]
    first, second = engine_of(**options), engine_of(**options)
    data, before = exported(first, asked("moved", prompt(N, 3), 60))
    second.import_request(data)
    state = state_of(second, "moved")
    kept = state.completions[0].kept
    assert kept is not None
    for layer, (one, other) in enumerate(zip(before, held(second, "moved"), strict=True)):
        sampled = {int(position) for position in kept.exact[layer] if position >= 4}
        assert len(sampled) >= 2
        for head in range(2):
            exact = (one["keys"][head].bfloat16().float() == other["keys"][head]).all(1)
            exact &= torch.arange(len(exact)) < one["lens"][head]
            old = {int(position) for position in one["positions"][head][exact]}
            assert sampled & {int(position) for position in one["positions"][head]} <= old
    again = unpack(second.export_request("moved"))[1]
    assert torch.equal(again["cache.0.0.exact.at"], unpack(data)[1]["cache.0.0.exact.at"])
    first.close()
    second.close()


def test_several_answers_move() -> None:
    first, second = engine_of(**EVICTING["h2o"]), engine_of(**EVICTING["h2o"])
    data, _ = exported(first, asked("moved", prompt(N, 3), NEW, n=2), 5)
    name = second.import_request(data)
    output = run(second)[name]
    assert [len(answer(output, index)) for index in range(2)] == [NEW, NEW]
    first.close()
    second.close()


def test_a_request_names_its_method() -> None:
    first, second = engine_of(), engine_of()
    cache = CacheOptions(method="snapkv", budget=200)
    data, _ = exported(first, asked("moved", prompt(N, 3), NEW, cache=cache))
    assert unpack(data)[0]["format"] == CODED
    second.import_request(data)
    assert len(answer(run(second)["moved"])) == NEW
    first.close()
    second.close()


@pytest.mark.parametrize(
    "part", ["pages", "exact.at", "headers", "made", "positions", "fitted", "scores", "log_masses"]
)
def test_damage_leaves_nothing_behind(part: str) -> None:
    engine = engine_of(**EVICTING["snapkv"])
    about, tensors = unpack(exported(engine, asked("moved", prompt(N, 3), NEW))[0])
    names = {"pages": "codes.pages", "headers": "codes.headers", "made": "codes.made", "fitted": "codes.fitted"}
    name = f"cache.0.1.{names.get(part, part)}"
    if part == "pages":
        tensors[name][20] ^= 4
    elif part == "headers":
        tensors[name] = tensors[name][:-1].clone()
    elif part in ("scores", "log_masses"):
        tensors[name] = torch.zeros(3)
    elif part == "made":
        del tensors[name]
    elif part == "positions":
        tensors[name][0, 5] = 400
    else:
        tensors[name] = tensors[name].flip(0) + 1
    with pytest.raises(DataError):
        engine.import_request(pack(about, tensors))
    assert not engine.busy
    assert engine.stats().kv_bytes == 0
    engine.check_integrity()
    engine.close()


def test_codes_of_other_parts_for_single_heads_are_refused() -> None:
    transform = transform_of_tiny("gqa")
    other = calibrate_transform(tiny("gqa"), [ids(512, seed) for seed in (11, 12)], length=512)
    first = engine_of(**EVICTING["snapkv"])
    data, _ = exported(first, asked("moved", prompt(N, 3), NEW))
    second = engine_of(calibration=replace(transform, heads=other.heads), **EVICTING["snapkv"])
    with pytest.raises(CacheMismatchError, match="same transform file"):
        second.import_request(data)
    first.close()
    second.close()


def test_without_parts_for_single_heads_requests_move_as_they_are() -> None:
    engine = engine_of(calibration=replace(transform_of_tiny("gqa"), heads=()), **EVICTING["snapkv"])
    data, _ = exported(engine, asked("moved", prompt(N, 3), NEW))
    assert unpack(data)[0]["format"] == FORMAT
    engine.import_request(data)
    assert len(answer(run(engine)["moved"])) == NEW
    engine.close()


def test_coding_runs_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    code = kept_coder.KeptCoder.code

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return code(*args)

    monkeypatch.setattr(kept_coder.KeptCoder, "code", noted)
    engine = engine_of(**EVICTING["h2o"])
    exported(engine, asked("moved", prompt(N, 3), NEW))
    assert [name.startswith("millpond-codes") for name in threads] == [True]
    engine.close()
