"""A transform file is unpacked once as long as its content is the same, and damage is found at once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from millpond.codec.transform import transform_cache
from millpond.codec.transform.transform_cache import cached_transform
from millpond.codec.transform.transform_file import ModelTransform
from millpond.errors import DataError
from tests.helpers.formats.coded import TRANSFORM, WITH_HEADS


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform_cache, "_transforms", type(transform_cache._transforms)())


def test_the_same_content_is_read_once(tmp_path: Path) -> None:
    file = shutil.copy(TRANSFORM, tmp_path / "t.safetensors")
    first = cached_transform(file)
    os.utime(file, (1, 1))
    assert cached_transform(str(file)) is first


def test_other_content_under_the_name_is_read(tmp_path: Path) -> None:
    file = shutil.copy(TRANSFORM, tmp_path / "t.safetensors")
    first, about = cached_transform(file), file.stat()
    shutil.copy(WITH_HEADS, file)
    assert cached_transform(file).heads
    assert not first.heads
    content = bytearray(TRANSFORM.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(DataError, match="digest"):
        cached_transform(file)
    with pytest.raises(DataError, match="digest"):  # nothing of it is held
        cached_transform(file)


def test_the_last_two_are_held(tmp_path: Path) -> None:
    files = [Path(shutil.copy(TRANSFORM, tmp_path / f"{number}.safetensors")) for number in range(3)]
    read = [cached_transform(file) for file in files]
    assert len(transform_cache._transforms) == 2
    assert cached_transform(files[2]) is read[2]
    assert cached_transform(files[1]) is read[1]
    assert cached_transform(files[0]) is not read[0]


def test_what_is_read_in_inference_mode_serves_others() -> None:
    with torch.inference_mode():
        transform = cached_transform(TRANSFORM)
    assert not any(side.mean.is_inference() for layer in transform.layers for side in layer)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.safetensors", Path("/dev/null")):
        with pytest.raises(DataError):
            cached_transform(path)


def test_a_file_too_large_to_be_held_is_left_to_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform_cache, "MOST_UNPACKED", TRANSFORM.stat().st_size - 1)
    assert isinstance(cached_transform(TRANSFORM), ModelTransform)
    assert not transform_cache._transforms
