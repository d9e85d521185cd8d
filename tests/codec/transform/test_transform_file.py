"""Transform files: what is written is read, and what is damaged or of another model is refused."""

from __future__ import annotations

import json
import lzma
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from millpond.codec.transform import transform_file
from millpond.codec.transform.fit import fit_side
from millpond.codec.transform.transform_file import (
    Calibrated,
    FittedModel,
    ModelTransform,
    fitted_model_of,
    load_transform,
)
from millpond.errors import CacheMismatchError, DataError, OptionError

MODEL = FittedModel("Llama", ((2, 4, 4), (2, 4, 6)), '{"rope_theta": 10000.0}', "abc")


@pytest.fixture(scope="module")
def transform() -> ModelTransform:
    generator = torch.Generator().manual_seed(0)

    def side(d: int) -> object:
        x = torch.randn(256, d, generator=generator)
        return fit_side(torch.eye(d), x.mean(0), x.T.double().cov(), x, 0.1)

    layers = tuple((side(8), side(heads * dim)) for heads, _, dim in MODEL.shapes)
    heads = tuple(tuple((side(4), side(dim)) for _ in range(heads)) for heads, _, dim in MODEL.shapes)
    calibrated = Calibrated(256, "d", 0.1, 0.3, 4.0, 2.0)
    return ModelTransform(MODEL, calibrated, layers, torch.tensor([0.1, 0.2]), heads)  # type: ignore[arg-type]


def test_a_file_is_read_as_it_was_written(transform: ModelTransform, tmp_path: Path) -> None:
    assert transform.save(tmp_path / "t") == (tmp_path / "t").stat().st_size
    found = load_transform(tmp_path / "t")
    assert (found.model, found.calibrated, found.digest()) == (MODEL, transform.calibrated, transform.digest())
    assert transform.digest_of_heads() == found.digest_of_heads() != found.digest()
    heads = [[sides for layer in of.heads for sides in layer] for of in (transform, found)]
    for one, other in zip((*transform.layers, *heads[0]), (*found.layers, *heads[1]), strict=True):
        for a, b in zip(one, other, strict=True):
            assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("mean", "rows", "columns"))
            assert torch.equal(torch.cat(a.levels), torch.cat(b.levels))


def test_a_file_without_parts_for_single_heads(transform: ModelTransform, tmp_path: Path) -> None:
    replace(transform, heads=()).save(tmp_path / "t")
    found = load_transform(tmp_path / "t")
    assert found.digest() == transform.digest()
    with pytest.raises(OptionError, match=r"no parts for single heads.*make it again"):
        found.digest_of_heads()


def test_a_packed_file_is_read_and_its_size_is_bounded(
    transform: ModelTransform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transform.save(tmp_path / "t")
    packed = tmp_path / "t.safetensors.xz"
    packed.write_bytes(lzma.compress((tmp_path / "t").read_bytes()))
    assert load_transform(packed).digest() == transform.digest()
    assert fitted_model_of(packed) == fitted_model_of(tmp_path / "t") == MODEL
    monkeypatch.setattr(transform_file, "MOST_UNPACKED", 1000)
    with pytest.raises(DataError, match="at most 1,000 bytes"):
        load_transform(packed)
    for content in (b"no file", packed.read_bytes()[:200], b""):
        packed.write_bytes(content)
        for read in (load_transform, fitted_model_of):
            with pytest.raises(DataError, match=r"t\.safetensors\.xz.*cannot be read"):
                read(packed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "Qwen2"}, "another class.*Llama in the file, Qwen2 here"),
        ({"shapes": ((4, 4, 4),) * 2}, "another shape of layers"),
        ({"rope": '{"rope_theta": 5.0}'}, "another rotary embedding.*10000.*5"),
        ({"weights": "other"}, "another set of weights"),
    ],
)
def test_another_model_is_refused_with_what_differs(change: dict[str, object], words: str) -> None:
    MODEL.check_equal(MODEL)
    with pytest.raises(CacheMismatchError, match=words):
        MODEL.check_equal(replace(MODEL, **change))  # type: ignore[arg-type]


Tensors = dict[str, torch.Tensor]


def without(tensors: Tensors) -> None:
    del tensors["1.value.columns"]


def narrower(tensors: Tensors) -> None:
    tensors["0.key.mean"] = tensors["0.key.mean"][:4].clone()


def other_type(tensors: Tensors) -> None:
    tensors["0.key.rows"] = tensors["0.key.rows"].float()


def more_rows(tensors: Tensors) -> None:
    tensors["0.key.rows"] = tensors["0.key.rows"].repeat(3, 1)


def without_head(tensors: Tensors) -> None:
    del tensors["1.1.key.mean"]


def wider_head(tensors: Tensors) -> None:
    tensors["0.1.value.rows"] = tensors["0.value.rows"].clone()


def not_finite(tensors: Tensors) -> None:
    tensors["1.key.distortions"][0, 0] = torch.nan


def one_bit(tensors: Tensors) -> None:
    tensors["1.key.columns"].view(torch.uint8)[0, 0] ^= 1


def unsorted(tensors: Tensors) -> None:
    tensors["0.value.levels"] = tensors["0.value.levels"].flip(0)


@pytest.mark.parametrize(
    "spoil", [without, narrower, other_type, more_rows, without_head, wider_head, not_finite, one_bit, unsorted]
)
def test_damaged_files(transform: ModelTransform, tmp_path: Path, spoil: Callable[[Tensors], None]) -> None:
    path = tmp_path / "t"
    transform.save(path)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path, about)
    with pytest.raises(DataError, match="damaged"):
        load_transform(path)


@pytest.mark.parametrize(
    "facts", ['{"name": 1}', "[]", "no JSON", '{"name": "L", "shapes": [[-2, 4, 4]], "rope": "", "weights": ""}']
)
def test_facts_that_no_calibration_writes(transform: ModelTransform, tmp_path: Path, facts: str) -> None:
    path = tmp_path / "t"
    transform.save(path)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    save_file(load_file(path), path, {**about, "model": facts})
    with pytest.raises(DataError, match="damaged"):
        load_transform(path)


def test_files_of_other_kinds(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(DataError, match="cannot be read"):
        load_transform(path)
    save_file({"a": torch.zeros(2)}, path, {"format": "millpond calibration 1"})
    with pytest.raises(DataError, match="its format is 'millpond calibration 1'"):
        load_transform(path)
    path.write_bytes(struct.pack("<Q", 1 << 40) + json.dumps({}).encode())
    with pytest.raises(DataError, match="header is too long"):
        load_transform(path)
    path.write_bytes(b"ab")
    with pytest.raises(DataError, match=r"header is too long|cannot be read"):
        load_transform(path)
