"""Turns of methods that evict are stored in codes: what was kept goes on, and its error does not grow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.sessions.stored_turn import CODED
from millpond.engine.transfer.container import pack, unpack
from millpond.errors import OptionError
from tests.helpers.engine.coded import agreement, answer, asked, engine_of, first_choices, prompt, run
from tests.helpers.engine.evicted import EVICTING, held
from tests.helpers.engine.sessions import stored
from tests.helpers.hf.transform import transform_of_tiny

NEW = 20


def turn(engine: Engine, words: list[int], known: list[int] | None = None, **options: Any) -> RequestOutput:
    """The answer to a prompt; what ended is on the disk when this returns."""
    engine.add(asked("turn", words, NEW, known or (), **options))
    output = run(engine)["turn"]
    answer(output)
    assert engine.sessions is None or engine.sessions.wait(60)
    return output


def restored(output: RequestOutput) -> tuple[int, int, bool]:
    kv = output.completions[0].kv
    assert kv is not None
    return kv.restored_tokens, kv.decoded_tokens, kv.exact


@pytest.mark.parametrize("method", ["h2o", "snapkv", "window"])
def test_a_turn_is_continued_after_a_restart(method: str, tmp_path: Path) -> None:
    """First choices are those of its answer, and a plan for the later prompt, made of numbers, is nearly the same."""
    options, words, later = EVICTING[method], prompt(400, 5), prompt(30, 6)
    outputs, sizes, kept = {}, {}, {}
    expected: list[int] = []
    for name, codec in (("plain", {"storage_codec": None}), ("codes", {})):
        folder = tmp_path / name
        engine = engine_of(cache_dir=folder, **options, **codec)
        first = answer(turn(engine, words))
        (path,) = stored(folder)
        sizes[name] = path.stat().st_size
        engine.close()
        engine = engine_of(cache_dir=folder, **options, **codec)
        engine.add(asked("turn", [*words, *first, *later], NEW, expected))
        run(engine, 1)
        kept[name] = held(engine, "turn", later_prompts=True)
        outputs[name] = run(engine)["turn"]
        expected = expected or answer(outputs[name])
        assert engine.sessions is not None
        assert engine.sessions.wait(60)
        engine.close()
    assert sizes["codes"] < 0.6 * sizes["plain"]
    assert {unpack(path.read_bytes())[0]["format"] for path in stored(tmp_path / "codes")} == {CODED}
    assert restored(outputs["plain"])[0] == 400 + NEW - 1
    assert restored(outputs["codes"]) == (400 + NEW - 1, 400 + NEW - 1, False)
    assert agreement(first_choices(outputs["codes"]), expected) >= 0.9
    for one, other in zip(kept["plain"], kept["codes"], strict=True):
        assert one.keys() == other.keys()
        same = {*one["positions"].flatten().tolist()} & {*other["positions"].flatten().tolist()}
        assert len(same) > 0.8 * len({*one["positions"].flatten().tolist()})


@pytest.mark.parametrize("method", ["h2o", "snapkv"])
def test_what_is_restored_is_what_was_stored(method: str, tmp_path: Path) -> None:
    """Beside a turn of an engine without codes: kept sets, scores, budgets and queries are equal bit by bit."""
    found = []
    for codec in ({"storage_codec": None}, {}):
        folder = tmp_path / str(len(found))
        engine = engine_of(cache_dir=folder, **EVICTING[method], **codec)
        turn(engine, prompt(400, 5))
        (path,) = stored(folder)
        _, tensors = unpack(path.read_bytes())
        named = {name.removeprefix("cache."): tensor for name, tensor in tensors.items() if name.startswith("cache.")}
        if (sequence_codec := engine._parts.sequence_codec) is not None:
            named, _ = sequence_codec.kept.decode(named, tensors["ids"].numpy())
        found.append(named)
        engine.close()
    plain, coded = found
    assert plain.keys() - {"closed"} == coded.keys()
    for name in coded:
        assert torch.equal(plain[name], coded[name]) == (not name.endswith(("keys", "values"))), name


@pytest.mark.parametrize("method", ["h2o", "snapkv"])
def test_many_turns_are_as_close_as_one(method: str, tmp_path: Path) -> None:
    """What the last turn decodes of the first turn's entries is what the second one did, to the last few codes."""
    engine, words = engine_of(cache_dir=tmp_path, method=method, budget=300), prompt(400, 5)
    first: dict[tuple[int, int, int], torch.Tensor] = {}
    moved = total = 0
    for number in range(8):
        engine.add(asked("turn", words, NEW))
        run(engine, 1)
        if number:
            for layer, one in enumerate(held(engine, "turn")):
                for head in range(2):
                    for slot in range(int(one["lens"][head])):
                        position = int(one["positions"][head, slot])
                        if position < 300:  # none of the newest of the first turn
                            row = one["keys"][head, slot]
                            before = first.setdefault((layer, head, position), row)
                            total += 1
                            moved += not torch.allclose(before, row, atol=1e-3)
        words = words + answer(run(engine)["turn"]) + prompt(12, 40 + number)
        assert engine.sessions is not None
        assert engine.sessions.wait(60)
    assert total > 2000
    assert moved < 0.02 * total
    engine.close()


@pytest.mark.parametrize("place", ["checksum", "page", "codes"])
def test_a_damaged_turn_is_read_again_from_its_prompt(place: str, tmp_path: Path) -> None:
    engine = engine_of(cache_dir=tmp_path, **EVICTING["snapkv"])
    words = prompt(300, 5)
    words = words + answer(turn(engine, words)) + prompt(10, 6)
    (path,) = stored(tmp_path)
    data = bytearray(path.read_bytes())
    if place == "checksum":
        data[-100] ^= 1
    else:
        about, tensors = unpack(bytes(data))
        if place == "page":
            tensors["cache.0.codes.pages"][20] ^= 1
        else:
            about["codes"] = "transform:1.5 kept " + "0" * 64
        data = bytearray(pack(about, tensors))
    path.write_bytes(bytes(data))
    assert restored(turn(engine, words))[0] == 0
    assert engine.sessions is not None
    assert engine.sessions.stats().torn == 1
    assert not path.exists()
    engine.close()


def test_a_file_without_parts_for_single_heads_is_refused_at_start(tmp_path: Path) -> None:
    without = replace(transform_of_tiny("gqa"), heads=())
    with pytest.raises(OptionError, match=r"'snapkv': .*no parts for single heads.*millpond calibrate"):
        engine_of(cache_dir=tmp_path, calibration=without, **EVICTING["snapkv"])
    engine = engine_of(cache_dir=tmp_path, calibration=without, **EVICTING["window"])  # one set for all heads
    turn(engine, prompt(300, 5))
    engine.close()
