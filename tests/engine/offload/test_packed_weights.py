"""Packed weight files: the tokens of weights that are packed in memory, and what damages them is found."""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.open import Opened, open_in_memory
from millpond.engine.offload.planner import EXAMPLE
from millpond.engine.request import Request
from millpond.errors import DataError, OptionError
from millpond.models.weights import packed_file
from tests.helpers.hf.families import family
from tests.helpers.tiers.backends import FaultyFile

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PROMPTS = [[5, 9, 44, 7], list(range(3, 60)), [70, 71, 72, 73, 74, 75, 76, 77, 78]]
GREEDY = mp.SamplingParams(max_tokens=12, temperature=0)
DISK = mp.Plan(weights={"disk": 1.0}, slots=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen3", "opt", "gpt_neox"):
        sizes = {"ffn_dim": 64} if name == "opt" else {"intermediate_size": 64, "tie_word_embeddings": name == "qwen3"}
        family(name).make(**sizes, num_hidden_layers=4).save_pretrained(root / name)
    return {path.name: path for path in root.iterdir()}


def tokens(folder: Path, **options: Any) -> list[tuple[int, ...]]:
    with mp.LLM(folder, method="h2o", budget=16, weights="int4", **options) as llm:
        return [tuple(out.completions[0].token_ids) for out in llm.generate(PROMPTS, GREEDY)]


def packed(disk: Path) -> Path:
    (found,) = disk.glob("*.weights")
    assert [path.name for path in disk.iterdir()] == [found.name], "nothing else is in the folder"
    return found


@pytest.mark.covering
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "gpt_neox"])
def test_tokens_are_those_of_weights_packed_in_memory(
    name: str, weights: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    found = {}
    for how, options in {
        "in memory": {},
        "read in every sweep": {"plan": DISK, "disk": tmp_path, "verify": "always"},
        "some stay": {"plan": mp.Plan(weights={"host": 0.5, "disk": 0.5}), "disk": tmp_path},
        "all stay": {"memory": "64MiB", "disk": tmp_path},
    }.items():
        with mp.LLM(folders[name], weights=weights, method="h2o", budget=16, **options) as llm:
            found[how] = [tuple(out.completions[0].token_ids) for out in llm.generate(PROMPTS, GREEDY)]
            assert [tuple(out.completions[0].token_ids) for out in llm.generate(PROMPTS, GREEDY)] == found[how]
    assert len(set(found["in memory"])) == len(PROMPTS), "answers differ, so that mixed-up requests would be seen"
    assert all(one == found["in memory"] for one in found.values())
    assert packed(tmp_path).name.endswith(f".{weights}.weights")


def test_a_sweep_reads_the_bytes_of_the_codes(folders: dict[str, Path], tmp_path: Path) -> None:
    with mp.LLM(folders["llama"], weights="int4", disk=tmp_path, plan=DISK, method="full") as llm:
        assert llm.plan is not None
        read = llm.plan.bytes["disk"]["weights"]
        whole = packed(tmp_path).stat().st_size
        assert 0.5 * whole < read < whole
        streamed = llm.engine._model._streamed
        assert streamed is not None
        before, steps = streamed.bytes_read, 5
        llm.generate([[5, 6, 7]], mp.SamplingParams(max_tokens=steps, temperature=0))
        assert (streamed.bytes_read - before) % (read // 4) == 0
        assert (steps - 1) * read <= streamed.bytes_read - before <= (steps + 1) * read


def test_it_is_packed_once_and_anew_for_another_checkpoint(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, written = tmp_path / "disk", []
    disk.mkdir()
    write = packed_file._write

    def counted(path: Path, *rest: Any) -> list[int]:
        written.append(path.name)
        return write(path, *rest)

    monkeypatch.setattr(packed_file, "_write", counted)
    first = tokens(folders["llama"], disk=disk, plan=DISK)
    assert tokens(folders["llama"], disk=disk, plan=DISK) == first
    assert len(written) == 1
    other = tmp_path / "llama"  # of the same name and shapes
    made = family("llama").make(intermediate_size=64, tie_word_embeddings=False, num_hidden_layers=4)
    for weight in made.parameters():
        weight.data.mul_(1.5)
    made.save_pretrained(other)
    expected = tokens(other)
    assert tokens(other, disk=disk, plan=DISK) == expected
    assert expected != first
    assert len(set(written)) == 2


def test_a_file_of_another_checkpoint_under_the_right_name_counts_as_none(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    first = tokens(folders["llama"], disk=tmp_path, plan=DISK)
    path = packed(tmp_path)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[8:16])
    header = json.loads(content[20 : 20 + length])
    header["source"] = header["source"][::-1]
    text = json.dumps(header).encode()
    assert len(text) == length
    path.write_bytes(content[:16] + struct.pack("<I", zlib.crc32(text)) + text + content[20 + length :])
    assert tokens(folders["llama"], disk=tmp_path, plan=DISK) == first
    assert packed(tmp_path).read_bytes() == content


@pytest.mark.parametrize("kept", [0, 11, 40, 5000, -4096, -1])
def test_a_file_that_is_cut_off_counts_as_none(kept: int, folders: dict[str, Path], tmp_path: Path) -> None:
    first = tokens(folders["llama"], disk=tmp_path, plan=DISK)
    path = packed(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    assert tokens(folders["llama"], disk=tmp_path, plan=DISK) == first
    assert packed(tmp_path).read_bytes() == content


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def extents(path: Path) -> list[tuple[int, int]]:
    """Offset in the file and bytes of each part."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[8:16])
    begin = -(-(20 + length) // 4096) * 4096
    return [(begin + at, n) for at, n, _ in json.loads(content[20 : 20 + length])["extents"]]


@pytest.mark.covering
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("end", [0, -1])
def test_a_flipped_byte_is_found_at_the_first_read(
    part: int, end: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    tokens(folders["llama"], disk=tmp_path, plan=DISK)
    path = packed(tmp_path)
    offset, nbytes = extents(path)[part]
    flip(path, offset + (0 if end == 0 else nbytes - 1))
    with pytest.raises(DataError, match=rf"weights at offset {offset:,}: {nbytes:,} bytes have the checksum.*remove"):
        tokens(folders["llama"], disk=tmp_path, plan=DISK)


def test_a_byte_that_flips_later_is_found_where_each_read_is_verified(folders: dict[str, Path], tmp_path: Path) -> None:
    for verify, fails in (("first", False), ("always", True)):
        config: dict[str, Any] = {"weights": "int4", "method": "full", "disk": tmp_path, "plan": DISK, "verify": verify}
        with mp.LLM(folders["llama"], **config) as llm:
            llm.generate(PROMPTS, GREEDY)
            path = packed(tmp_path)
            flip(path, extents(path)[2][0])
            if fails:
                with pytest.raises(DataError, match="checksum"):
                    llm.generate(PROMPTS, GREEDY)
            else:
                llm.generate(PROMPTS, GREEDY)
        path.unlink()


@pytest.fixture
def faulty(folders: dict[str, Path], tmp_path: Path) -> Iterator[Opened]:
    FaultyFile.fault, FaultyFile.times = None, 0
    config = EngineConfig(method="h2o", budget=16, weights="int4")
    yield open_in_memory(folders["llama"], None, DISK, None, config, disk=tmp_path, open_file=FaultyFile)
    FaultyFile.fault = None


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "Input/output error"), 0])
def test_a_read_that_fails_once_is_made_again_and_twice_ends_the_step(
    fault: Any, faulty: Opened, folders: dict[str, Path]
) -> None:
    engine = Engine(faulty.model, None, faulty.config, streamed=faulty.streamed)

    def answers() -> list[Any]:
        for n, prompt in enumerate(PROMPTS):
            engine.add(Request(request_id=str(n), prompt=tuple(prompt), params=GREEDY))
        found = {output.request_id: output for output in engine.drain()}
        return [found[str(n)].error or found[str(n)].completions[0].token_ids for n in range(len(PROMPTS))]

    expected = answers()
    FaultyFile.fault, FaultyFile.times = fault, 1
    assert answers() == expected
    assert FaultyFile.times == 0
    FaultyFile.times = 8  # twice ahead and twice when it is needed, of each slot
    errors = [one for one in answers() if isinstance(one, Exception)]
    assert errors
    assert all(isinstance(one, DataError) and ".weights at offset" in str(one) for one in errors)
    FaultyFile.times = 0
    assert answers() == expected
    engine.close()


def test_packing_that_fails_leaves_nothing_behind(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, content: Any, at: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for nameless in (packed_file._nameless, lambda folder: None):
        monkeypatch.setattr(packed_file, "_nameless", nameless)
        with monkeypatch.context() as patched:
            patched.setattr(packed_file, "_write_at", full)
            with pytest.raises(OptionError, match="cannot be written: No space left"):
                tokens(folders["llama"], disk=tmp_path, plan=DISK)
        assert list(tmp_path.iterdir()) == []
        tokens(folders["llama"], disk=tmp_path, plan=DISK)
        packed(tmp_path).unlink()


def test_what_is_refused(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="there is no such folder"):
        tokens(folders["llama"], memory="8MiB", disk=tmp_path / "nowhere")
    with pytest.raises(OptionError, match="unknown verify 'never'"):
        tokens(folders["llama"], disk=tmp_path, plan=DISK, verify="never")
    with pytest.raises(OptionError, match="verify= is for packed weights"):
        mp.LLM(folders["llama"], plan=DISK, verify="always")
    with pytest.raises(OptionError, match="with the same --weights"):
        tokens(folders["llama"], disk=tmp_path, plan=mp.Plan(model=plain_fingerprint(folders["llama"])))
    free = os.statvfs(tmp_path)
    small = os.statvfs_result((free[0], free[1], free[2], 1, 1, *free[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    with pytest.raises(OptionError, match=r"bytes free, and [\d,]+ are needed"):
        tokens(folders["llama"], disk=tmp_path, plan=DISK)
    monkeypatch.undo()
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(OptionError, match="cannot be written"):
            tokens(folders["llama"], disk=tmp_path, plan=DISK)


def plain_fingerprint(folder: Path) -> str:
    from millpond.engine.offload.model_size import model_size

    return model_size(folder).fingerprint


def test_a_plan_of_codes_fits_and_opens(folders: dict[str, Path], tmp_path: Path) -> None:
    kept: dict[str, Any] = {"method": "h2o", "budget": 16}
    asked: dict[str, Any] = {**kept, "disk": tmp_path, "prompt_tokens": 40, "new_tokens": 16, "machine": EXAMPLE}
    plain = mp.plan(folders["llama"], memory="20MiB", **asked)
    codes = mp.plan(folders["llama"], memory="20MiB", weights="int4", **asked)
    assert plain.model != codes.model
    with mp.LLM(folders["llama"], memory="20MiB", disk=tmp_path, plan=codes, weights="int4", **kept) as llm:
        assert llm.plan is not None
        assert codes.prediction is not None
        assert sum(llm.plan.bytes["host"].values()) <= 20 << 20
        assert llm.plan.bytes["host"]["weights"] < 0.6 * plain.prediction.total("host")  # type: ignore[union-attr]
        assert llm.plan.bytes["host"]["kv"] >= codes.prediction.bytes["host"]["kv"]
