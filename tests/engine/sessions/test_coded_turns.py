"""Turns that are stored in codes: they are continued, grow without being coded again, and old ones are still read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.sessions.stored_turn import CODED, FORMAT, StoredTurn, TurnPlace
from millpond.engine.transfer.container import pack, unpack
from millpond.errors import OptionError
from tests.helpers.engine.coded import CODEC, agreement, answer, asked, engine_of, first_choices, prompt, run
from tests.helpers.engine.sessions import stored
from tests.helpers.formats.files import same

NEW = 20


def engine_in(folder: Path | None, **options: Any) -> Engine:
    return engine_of(cache_dir=folder, **options)


def turn(engine: Engine, words: list[int], known: list[int] | None = None, **options: Any) -> RequestOutput:
    """The answer to a prompt; what ended is on the disk when this returns."""
    engine.add(asked("turn", words, NEW, known or (), **options))
    output = run(engine)["turn"]
    answer(output)
    assert engine.sessions is None or engine.sessions.wait(60)
    return output


def restored(output: RequestOutput) -> int:
    kv = output.completions[0].kv
    assert kv is not None
    return kv.restored_tokens


def content(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    return unpack(path.read_bytes())


def conversation(
    folder: Path, lengths: tuple[int, ...], **options: Any
) -> tuple[list[int], list[Path], list[list[int]]]:
    """All tokens of turns, each in a new engine; their files; and the answers."""
    words: list[int] = []
    files: list[Path] = []
    answers = []
    for number, length in enumerate(lengths):
        engine = engine_in(folder, **options)
        read = len(words) - 1 if words else 0
        words += prompt(length, 20 + number)
        output = turn(engine, words)
        assert restored(output) == read
        words += answer(output)
        answers.append(answer(output))
        files += [path for path in stored(folder) if path not in files]
        engine.close()
    return words, files, answers


def test_turns_are_continued_after_restarts_and_keep_their_bytes(tmp_path: Path) -> None:
    words, files, _ = conversation(tmp_path, (400, 50, 90, 200))
    found = [content(path) for path in files]
    assert {about["format"] for about, _ in found} == {CODED}
    for (_, one), (_, two) in pairwise(found):
        for name, tensor in one.items():
            if name.endswith("pages"):
                assert torch.equal(two[name][: len(tensor)], tensor)
                assert len(two[name]) > len(tensor)
            elif name.endswith("header"):
                assert torch.equal(two[name], tensor)
    assert len(found[-1][1]["cache.codes.0.0.pages"]) == (len(words) - 1 - 64) // 32


def test_tokens_of_later_turns_are_exact_by_their_attention(tmp_path: Path) -> None:
    words, files, _ = conversation(tmp_path, (400, 300))
    covered = (len(words) - 1 - 64) // 32 * 32
    last = content(files[-1])[1]
    later = [at for layer in (0, 1) for at in last[f"cache.codes.{layer}.exact.at"].tolist() if 420 < at < covered]
    assert 0 < len(later) < 100


def test_a_file_is_a_fraction_of_what_it_was(tmp_path: Path) -> None:
    sizes = []
    for codec in (None, CODEC):
        folder = tmp_path / str(codec)
        engine = engine_in(folder, storage_codec=codec)
        turn(engine, prompt(700, 3))
        (path,) = stored(folder)
        sizes.append(path.stat().st_size)
        engine.close()
    assert sizes[1] < 0.3 * sizes[0]


def test_what_follows_is_what_follows_exact_turns(tmp_path: Path) -> None:
    """First choices with the tokens of the undisturbed answer."""
    words, _, _ = conversation(tmp_path / "codes", (500,))
    words += prompt(30, 9)
    plain = engine_in(None, storage_codec=None)
    expected = answer(turn(plain, words))
    plain.close()
    engine = engine_in(tmp_path / "codes")
    output = turn(engine, words, known=expected)
    assert restored(output) == 500 + NEW - 1
    kv = output.completions[0].kv
    assert kv is not None
    assert (kv.decoded_tokens, kv.exact) == (500 + NEW - 1, False)
    assert agreement(first_choices(output), expected) >= 0.9
    engine.close()


@pytest.mark.parametrize("kind", ["gqa"])
def test_many_turns_are_as_close_as_one(kind: str, tmp_path: Path) -> None:
    """Divergence of the answer after 8 turns that were stored and taken up, beside that after one."""
    found = []
    for n_turns in (1, 8):
        folder = tmp_path / str(n_turns)
        words = prompt(400, 5) if n_turns == 1 else prompt(400 - 7 * 16, 5)
        engine = engine_in(folder)
        for _ in range(n_turns):
            turn(engine, words)
            words = words + prompt(16, len(words))
        logits = {}
        for name, chosen in (("codes", engine), ("plain", engine_in(None, storage_codec=None))):
            expected = logits.setdefault("known", answer(turn(chosen, words)) if name == "codes" else None)
            output = turn(chosen, words, known=expected)
            logits[name] = [one.logprob for one in output.completions[0].logprobs or ()]
            chosen.close()
        found.append(sum(abs(a - b) for a, b in zip(logits["codes"], logits["plain"], strict=True)) / NEW)
    assert found[1] < 1.5 * found[0] + 0.01


def test_a_turn_that_waits_to_be_written_is_continued_as_it_will_be_stored(tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    words = prompt(400, 3)
    engine.add(asked("turn", words, NEW))
    words = words + answer(run(engine)["turn"]) + prompt(40, 4)
    engine.add(asked("turn", words, NEW))  # at once
    output = run(engine)["turn"]
    assert restored(output) == 400 + NEW - 1
    assert engine.sessions is not None
    assert engine.sessions.wait(60)
    first, second = sorted((content(path)[1] for path in stored(tmp_path)), key=lambda one: len(one["ids"]))
    size = len(first["cache.codes.1.0.pages"])
    assert torch.equal(second["cache.codes.1.0.pages"][:size], first["cache.codes.1.0.pages"])
    engine.close()


def test_turns_that_were_stored_as_they_are_go_on(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, storage_codec=None)
    words = prompt(300, 3)
    words = words + answer(turn(engine, words)) + prompt(20, 4)
    engine.close()
    engine = engine_in(tmp_path)
    output = turn(engine, words)
    assert restored(output) == 300 + NEW - 1
    assert {content(path)[0]["format"] for path in stored(tmp_path)} == {FORMAT, CODED}
    engine.close()


def test_an_engine_without_the_codec_leaves_coded_turns_alone(tmp_path: Path) -> None:
    words, (path,), _ = conversation(tmp_path, (300,))
    engine = engine_in(tmp_path, storage_codec=None)
    assert restored(turn(engine, words + prompt(10, 1))) == 0
    assert path.exists()
    engine.close()
    engine = engine_in(tmp_path, storage_codec="transform:2")
    assert restored(turn(engine, words + prompt(10, 1))) == 0
    assert path.exists()
    engine.close()


def test_a_live_format_of_eight_bits(tmp_path: Path) -> None:
    words, files, _ = conversation(tmp_path, (300, 60), kind="wide", codec="int8")
    one, two = (content(path)[1]["cache.codes.0.0.pages"] for path in files)
    assert torch.equal(two[: len(one)], one)
    assert len(words) > 360


@pytest.mark.parametrize("place", ["checksum", "page", "transform", "ids"])
def test_a_damaged_turn_is_read_again_from_its_prompt(place: str, tmp_path: Path) -> None:
    words, (path,), _ = conversation(tmp_path, (300,))
    data = bytearray(path.read_bytes())
    if place == "checksum":
        data[-100] ^= 1
    else:
        about, tensors = unpack(bytes(data))
        if place == "page":
            tensors["cache.codes.1.0.pages"][1, 20] ^= 1
        elif place == "ids":
            tensors["cache.codes.segments"][0, 2] = 1
        else:
            about["codes"] = "transform:1.5 " + "0" * 64
        data = bytearray(pack(about, tensors))
    path.write_bytes(bytes(data))
    engine = engine_in(tmp_path)
    output = turn(engine, words + prompt(10, 1))
    assert restored(output) == 0
    assert engine.sessions is not None
    assert engine.sessions.stats().torn == 1
    assert not path.exists()
    engine.close()


@pytest.mark.parametrize("spans", [{"prompt_logprobs": 1}])
def test_requests_that_want_exact_prompts_read_them(spans: dict[str, Any], tmp_path: Path) -> None:
    words, _, _ = conversation(tmp_path, (300,))
    engine = engine_in(tmp_path)
    assert restored(turn(engine, words + prompt(10, 1), **spans)) == 0
    engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"method": "h2o", "budget": "50%", "codec": "int8"},
            "'h2o'.*codec 'int8' has codes already; use codec 'auto'",
        ),
        ({"method": "kvzip", "budget": "50%"}, "kvzip"),
        ({"codec": "int4"}, "'int4' leaves only codes"),
        ({"method": "cam", "budget": "50%"}, "'cam'.*merges entries"),
        ({"method": "infllm", "budget": "50%"}, "'infllm'.*means of blocks of keys"),
        ({"method": "streaming", "budget": "50%"}, "'streaming'.*other positions"),
    ],
)
def test_caches_without_codes_are_refused_by_name(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=words):
        engine_in(tmp_path, **options)


def test_the_bytes_of_a_turn_are_its_bytes_again(tmp_path: Path) -> None:
    _, (path,), _ = conversation(tmp_path, (300,))
    place = TurnPlace.of(path)
    assert place is not None
    data = path.read_bytes()
    assert same(StoredTurn.from_bytes(data, place, unpack(data)[1]["ids"].numpy()).to_bytes(place), data)
