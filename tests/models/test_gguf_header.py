"""Headers of GGUF files: what is read of them, and files that are damaged or made to harm."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.examples import examples
from tests.helpers.gguf.files import LAYERS, VOCAB, WIDTH, write_gguf

from millpond import optional
from millpond.errors import DataError, MillpondError, OptionError
from millpond.install_command import install_command
from millpond.models.gguf.convert import converted_folder
from millpond.models.gguf.header import read_header
from millpond.models.load import load_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", kind="Q4_0")
    return tmp_path / "tiny.gguf"


def test_it_is_what_the_package_gguf_reads(path: Path) -> None:
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert [(t.name, t.shape, t.type) for t in header.tensors] == [
        (t.name, tuple(int(n) for n in t.shape), t.tensor_type.name) for t in reader.tensors
    ]
    assert header.architecture == "llama"
    assert header.metadata["llama.block_count"] == LAYERS
    assert header.metadata["tokenizer.ggml.tokens"] == VOCAB
    assert header.metadata["general.name"] == "tiny"
    assert header.has_tokenizer
    assert header.size == sum(int(t.n_elements) for t in reader.tensors)


def packed(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + rest


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def tensor(name: str, *dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return (
        struct.pack("<Q", len(name))
        + name.encode()
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"GG", "ends inside its header"),
        (packed(magic=b"PK\3\4"), "does not begin with"),
        (packed(version=1), "its version is 1"),
        (b"GGUF" + (3).to_bytes(4, "big"), "big-endian"),
        (packed(tensors=2**60), "too short for 1,152,921,504,606,846,976 tensors"),
        (packed(keys=2**62), "too short for .* keys"),
        (packed(keys=1, rest=struct.pack("<Q", 2**63) + b"x" * 50), "a key has"),
        (packed(keys=1, rest=key("a", 8, struct.pack("<Q", 2**40))), "ends inside its header"),
        (packed(keys=1, rest=key("a", 9, struct.pack("<IQ", 8, 2**50))), "too short for .* strings"),
        (packed(keys=1, rest=key("a", 9, struct.pack("<IQ", 4, 2**50))), "too short for .* numbers"),
        (packed(keys=1, rest=key("a", 9, struct.pack("<IQ", 9, 1)) + b"x" * 50), "an array has values of the type 9"),
        (packed(keys=1, rest=key("a", 99, b"")), "a value has the type 99"),
        (packed(keys=1, rest=key("general.alignment", 4, struct.pack("<I", 3)), tensors=0), "no power of two"),
        (packed(tensors=1, rest=tensor("t", 4, 4)), "lies beyond its end"),
        (packed(tensors=1, rest=tensor("t", 2**62, 2**62)), "lies beyond its end"),
        (packed(tensors=1, rest=tensor("t", 32, offset=2**63)), "lies beyond its end"),
        (packed(tensors=1, rest=tensor("t", 33, kind=2)), "rows of 33 numbers, and Q4_0 blocks of 32"),
        (packed(tensors=1, rest=tensor("t", 4, kind=9_999)), "has the type 9999"),
        (packed(tensors=1, rest=tensor("t", *[1] * 5)), "has 5 dimensions"),
        (packed(tensors=2, rest=2 * tensor("t", 1) + b"0" * 64), "two tensors have one name"),
    ],
)
def test_a_damaged_header_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_header(tmp_path / "x.gguf")


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_of_the_header_is_read_or_refused(path: Path, data: st.DataObject) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
    changed = path.with_name("changed.gguf")
    changed.write_bytes(bytes(content[: data.draw(st.integers(0, 8000)) or None]))
    try:
        read_header(changed)
    except MillpondError as error:
        assert "changed.gguf" in str(error)  # noqa: PT017


def test_a_file_that_is_cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DataError, match=r"tensor '.*' lies beyond its end: the file is cut off"):
        load_model(path)


def _small_file(key: bytes, n_tensors: int) -> bytes:
    """One key of the type string, and tensors of 32 x 32 float32 numbers that all lie at offset 0."""
    content = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, 2)
    for name, value in ((b"general.architecture", b"llama"), (key, b"abc")):
        content += struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(value)) + value
    for index in range(n_tensors):
        content += struct.pack("<Q", 2) + b"t%d" % index + struct.pack("<IQQIQ", 2, 32, 32, 0, 0)
    return content + bytes(-len(content) % 32 + 4096)


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "shared.gguf"
    file.write_bytes(_small_file(b"general.name", 9))
    with pytest.raises(DataError, match=r"tensor 't\d' lies in the bytes of another"):
        read_header(file)


def test_a_number_of_parts_that_is_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "parts.gguf"
    file.write_bytes(_small_file(b"split.count", 1))
    with pytest.raises(OptionError, match=r"part of a GGUF file that was split"):
        converted_folder(file)


@pytest.mark.parametrize(
    "metadata",
    [
        {"feed_forward_length": 2**28},
        {"embedding_length": 2**30},
        {"vocab_size": 2**40 // WIDTH},
        {"block_count": 2**31},
    ],
)
def test_metadata_that_name_a_larger_model_allocate_nothing(metadata: dict[str, int], tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tokenizer=False, **{k: min(v, 2**32 - 1) for k, v in metadata.items()})
    with pytest.raises((DataError, OptionError), match=r"tiny\.gguf"):
        load_model(tmp_path / "tiny.gguf")


def test_a_missing_tensor_is_not_made_up(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", leave_out="blk.1.ffn_norm.weight")
    with pytest.raises(DataError, match=r"parameters, and its tensors hold|there is no tensor for"):
        load_model(tmp_path / "tiny.gguf")


def test_refusals_say_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"no such GGUF file"):
        load_model(tmp_path / "none.gguf")
    write_gguf(tmp_path / "odd.gguf", "cohere9", tokenizer=False)
    with pytest.raises(OptionError, match=r"architecture 'cohere9', which .* it reads .*llama.* Use the model's safet"):
        load_model(tmp_path / "odd.gguf")
    write_gguf(tmp_path / "model-00001-of-00003.gguf")
    with pytest.raises(OptionError, match=r"part of a GGUF file that was split; join .* --merge"):
        load_model(tmp_path / "model-00001-of-00003.gguf")

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(optional, "import_module", missing)
    with pytest.raises(OptionError, match=re.escape(f"needs gguf; install it with: {install_command('gguf')}")):
        converted_folder(tmp_path / "odd.gguf")
