"""Images of strangers: what is read, and what is refused before anything is decoded."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import zlib

import pytest
import torch
from PIL import Image

from millpond.errors import ImageError
from millpond.images.data_url import read_data_url
from millpond.images.header import Header, read_header
from millpond.images.limits import ImageLimits
from tests.helpers.images import file_of, image_url, processor, reader, url_of
from tests.hf.test_vision import picture

KINDS = {"PNG": {}, "JPEG": {}, "GIF": {}, "WEBP": {"lossless": True}}


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that says it has this size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_what_the_processor_makes_of_the_file(kind: str) -> None:
    data = file_of(picture(24, 16, 1), kind, **KINDS[kind])
    assert read_header(data)[:3] == (kind, 24, 16)
    expected = processor()(images=[Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="pt")["pixel_values"][0]
    read = [reader().read(data), reader().read(url_of(data, kind.lower())), reader().read(Image.open(io.BytesIO(data)))]
    assert all(torch.equal(one.pixels, expected) for one in read)
    assert len({one.digest for one in read}) == 1


def test_equal_images_have_equal_digests_however_they_are_sent() -> None:
    image = picture(24, 16, 1)
    files = [file_of(image, "PNG"), file_of(image, "PNG", compress_level=0), file_of(image, "WEBP", lossless=True)]
    assert len({reader().read(data).digest for data in files}) == 1
    other = image.copy()
    other.putpixel((8, 8), (0, 0, 0))
    assert reader().read(file_of(other)).digest != reader().read(files[0]).digest


@pytest.mark.parametrize("kind", ["VP8 ", "VP8X"])
def test_sizes_of_other_webp_files(kind: str) -> None:
    options = {"quality": 50} if kind == "VP8 " else {"lossless": True, "exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"}
    data = file_of(picture(33, 17, 2), "WEBP", **options)
    assert data[12:16] == kind.encode()
    assert read_header(data) == Header("WEBP", 33, 17)


REFUSED = {
    "remote": ("https://example.org/cat.png", "nothing is fetched"),
    "file": ("file:///etc/passwd", "nothing is fetched"),
    "not base64": ("data:image/png,abc", "nothing is fetched"),
    "another type": (url_of(b"<svg/>", "svg+xml"), "must be one of"),
    "broken base64": ("data:image/png;base64,!!!!", "broken"),
    "no image": (url_of(b"MZ" + bytes(100)), "no PNG, JPEG, GIF or WebP"),
    "empty": (url_of(b""), "no PNG, JPEG, GIF or WebP"),
    "wrong type": (url_of(file_of(picture(24, 16, 1)), "jpeg"), "says JPEG, and the bytes are a PNG"),
    "truncated header": (url_of(file_of(picture(24, 16, 1))[:12]), "ends inside its header"),
    "truncated": (url_of(file_of(picture(24, 16, 1))[:-400]), "cannot be decoded"),
    "truncated jpeg": (url_of(file_of(picture(240, 160, 1), "JPEG")[:900], "jpeg"), "cannot be decoded"),
    "bomb": (url_of(png(60_000, 60_000, zlib.compress(bytes(1000)))), "3,600,000,000 pixels"),
    "no pixels": (url_of(png(0, 5)), "at least one"),
    "thin": (url_of(png(1, 100_000)), "one side may be 20 times"),
    "jpeg without a frame": (url_of(b"\xff\xd8\xff\xda\x00\x04ab", "jpeg"), "no frame"),
    "endless jpeg part": (url_of(b"\xff\xd8\xff\xe0\x00\x00" * 9, "jpeg"), "shorter than its own length"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    url, message = REFUSED[what]
    with pytest.raises(ImageError, match=message):
        reader().read(url)


def test_limits_come_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("decoded"))
    url, data = image_url(1), file_of(picture(24, 16, 1))
    with pytest.raises(ImageError, match="bytes: it may have 64"):
        reader(n_bytes=64).read(url)
    with pytest.raises(ImageError, match="bytes: it may have 64"):
        reader(n_bytes=64).read(data)
    with pytest.raises(ImageError, match="384 pixels: it may have 383"):
        reader(pixels=383).read(url)
    with pytest.raises(ImageError, match="3 images: a prompt may have 2"):
        reader(count=2).read_all([url] * 3)
    for what in ("bomb", "thin"):
        with pytest.raises(ImageError):
            reader().read(REFUSED[what][0])


def test_base64_is_not_decoded_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("base64.b64decode", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="may have 1,000"):
        read_data_url(url_of(bytes(2000)), ImageLimits(n_bytes=1000))


def test_several_frames_and_many_scans() -> None:
    frames = [picture(24, 16, seed) for seed in (1, 2)]
    for kind in ("GIF", "WEBP", "PNG"):
        with pytest.raises(ImageError, match="several frames"):
            reader().read(file_of(frames[0], kind, save_all=True, append_images=frames[1:]))
    progressive = file_of(picture(64, 48, 1), "JPEG", progressive=True)
    assert read_header(progressive).scans > 2
    assert reader().read(progressive).pixels.shape == (3, 8, 8)
    with pytest.raises(ImageError, match="scans: it may have 2"):
        reader(scans=2).read(progressive)


def test_damaged_files_are_pictures_or_typed_errors() -> None:
    make = random.Random(0)
    files = [file_of(picture(24, 16, 1), kind, **options) for kind, options in KINDS.items()]
    refused = 0
    for _ in range(400):
        data = bytearray(make.choice(files))
        for _ in range(make.randint(1, 6)):
            data[make.randrange(len(data))] = make.randrange(256)
        try:
            reader().read(bytes(data[: make.randint(1, len(data))] if make.random() < 0.3 else data))
        except ImageError:
            refused += 1
    assert refused > 50


def test_a_text_has_a_place_for_each_image() -> None:
    assert reader().expand("w3 <image> w4", 1) == "w3 <image><image><image><image> w4"
    for n in (0, 2):
        with pytest.raises(ImageError, match=f"the prompt has {n} images and 1 times '<image>'"):
            reader().expand("w3 <image> w4", n)


@pytest.mark.slow
def test_pillow_and_processors_are_imported_when_an_image_is_read() -> None:
    code = (
        "import sys, millpond.images.reader; assert 'PIL' not in sys.modules;"
        "import millpond.engine.llm, millpond.server.app;"  # transformers loads a part of Pillow itself
        "assert not [name for name in sys.modules if 'image_processing' in name or name == 'PIL.PngImagePlugin']"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
