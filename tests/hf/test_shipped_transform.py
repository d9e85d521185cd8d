"""Transform files that come with millpond-models: found by the model's mark, small, with cards."""

from __future__ import annotations

from pathlib import Path

import pytest

import millpond as mp
from millpond.codec.transform.transform_file import fitted_model_of, load_transform
from millpond.errors import DataError, OptionError
from millpond.hf import text_storage
from millpond.hf.text_storage import transform_of
from millpond.models.installed import transform_files
from tests.helpers.hf.transform import tiny, transform_of_tiny

FOLDER = Path(__file__).parents[2] / "packages" / "millpond-models" / "src" / "millpond_models" / "transforms"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two files, of which the second is of the model `gqa`."""
    files = [tmp_path / f"{kind}.safetensors" for kind in ("biases", "gqa")]
    for file in files:
        transform_of_tiny(file.stem).save(file)
    monkeypatch.setattr(text_storage, "transform_files", lambda: files)
    return files


def test_the_file_of_a_model_is_found_by_its_mark(shipped: list[Path]) -> None:
    assert transform_of(tiny("gqa"), None).digest() == transform_of_tiny("gqa").digest()
    assert fitted_model_of(shipped[1]) == transform_of_tiny("gqa").model
    with mp.compress(tiny("gqa"), "full") as cache:
        storage = mp.TextStorage(cache, "transform:1.5", None)
        assert storage.transform.digest() == transform_of_tiny("gqa").digest()


def test_a_model_without_a_file_is_told_the_command(shipped: list[Path]) -> None:
    with pytest.raises(
        OptionError, match=r"none comes with millpond-models.*millpond calibrate --codec transform --out"
    ):
        transform_of(tiny("norms"), None)


def test_a_damaged_file_is_named(shipped: list[Path]) -> None:
    shipped[0].write_bytes(b"no file")
    with pytest.raises(DataError, match=r"biases\.safetensors"):
        transform_of(tiny("gqa"), None)


def test_shipped_files_are_small_and_have_cards() -> None:
    files = sorted(FOLDER.glob("*.safetensors.xz")) or transform_files()
    if not files:
        pytest.skip("neither a checkout nor millpond-models")
    assert len(files) == 2
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    for file in files:
        transform = load_transform(file)
        card = (file.parent / f"{file.name.removesuffix('.safetensors.xz')}.md").read_text(encoding="utf-8")
        assert f"`{transform.digest()[:12]}`" in card
        assert f"`{transform.calibrated.digest[:12]}`" in card
        assert f"{file.stat().st_size:,} bytes" in card
        assert transform.calibrated.most_bits == 2.0
        with pytest.raises(OptionError, match="up to 2 bits"):
            transform.check_bits(2.5)
        if transform.heads:
            assert f"`{transform.digest_of_heads()[:12]}`" in card
            transform.check_head_bits(1.5)
        with pytest.raises(OptionError, match=r"up to 1\.5 bits.*--most-head-bits 2|no parts for single heads"):
            transform.check_head_bits(2.0)
