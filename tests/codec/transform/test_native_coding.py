"""Native encoding and decoding: within 1e-5 of torch, and with equal bits on every instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from millpond.codec.transform.coding import decode, encode, encode_tokens, project
from millpond.codec.transform.levels import cuts_of
from millpond.codec.transform.page import TOKENS, pack_pages, unpack_pages
from millpond.codec.transform.prompt_header import LayerHeader, Sides
from millpond.errors import DataError
from millpond.kernels.native import library
from millpond.kernels.native import transform as native
from millpond.kernels.transform_args import BackTransform, CodedDimensions
from tests.helpers.codec.transform import AT, digest, drawn, header_of, layer_of, turned
from tests.helpers.kernels.libraries import running

pytestmark = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")

#: Of z, pages and decoded tokens of the layer below, on every instruction set.
GOLDEN = {"z": "8661af6d6b2c9151", "pages": "2930b1e7104e993f", "tokens": "eaaaec4e71646ff3"}


def tokens_of(layer: Sides, pages: int = 3, seed: int = 7) -> list[Tensor]:
    return [drawn(TOKENS * pages, len(side.mean), seed=seed + nth) for nth, side in enumerate(layer)]


def coded(layer: Sides, header: LayerHeader, x: list[Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    z = (project(layer[0], x[0]), project(layer[1], x[1]))
    return z, encode(layer, header, z, AT)


def in_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("MILLPOND_KERNELS", "reference")


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("key", "value", "pages"),
    [((70, 83), (37, 48), 3), ((1, 1), (5, 200), 1), ((192, 192), (150, 192), 5), ((6, 8), (8, 8), 300)],
)
def test_native_numbers_are_those_of_torch(
    key: tuple[int, int], value: tuple[int, int], pages: int, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(key, value)
    header, x = header_of(layer, plain=plain), tokens_of(layer, pages)
    z, found = coded(layer, header, x)
    tokens = decode(layer, header, found, AT)
    in_torch(monkeypatch)
    for one, other in zip(z, coded(layer, header, x)[0], strict=True):
        assert_near(one, other)
    assert torch.equal(encode(layer, header, z, AT), found)
    in_one = encode_tokens(layer, header, (x[0], x[1]), AT)
    assert float((in_one != found).float().mean()) < 1e-3
    for one, other in zip(tokens, decode(layer, header, found, AT), strict=True):
        assert_near(one, other)


def test_codes_of_torch_differ_only_beside_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of((192, 192), (192, 192))
    header, x = header_of(layer), tokens_of(layer, 40)
    codes = unpack_pages(coded(layer, header, x)[1], header.bits, AT)
    in_torch(monkeypatch)
    z, pages = coded(layer, header, x)
    others = unpack_pages(pages, header.bits, AT)
    differ = (codes != others).nonzero()
    assert len(differ) < 1e-4 * codes.numel()
    for token, column in differ.tolist():
        nth, i = divmod(column, 192)
        part, size = header[nth], float(z[nth].abs().max())
        u = float((z[nth][token, i] - part.mean[i]) / part.scale[i])
        cuts = cuts_of(layer[nth].levels[int(part.bits[i]) - 1])
        assert float((cuts - u).abs().min()) < 1e-5 * size / float(part.scale[i])


@pytest.mark.parametrize("isa", library.runnable())
def test_every_instruction_set_gives_the_golden_bits(isa: str) -> None:
    layer = layer_of()
    header = header_of(layer)
    with running(isa):
        z, pages = coded(layer, header, tokens_of(layer))
        tokens = decode(layer, header, pages, AT)
    assert {"z": digest(*z), "pages": digest(pages), "tokens": digest(*tokens)} == GOLDEN


def test_another_order_of_sums_has_other_bits() -> None:
    """So that the golden bits find it: codes and tokens are those of the same layer, up to rounding."""
    layer = layer_of()
    header = header_of(layer)
    pages = coded(layer, header, tokens_of(layer))[1]
    codes = unpack_pages(pages, header.bits, AT)
    n_keys = layer[0].n_rows
    other, other_header = turned(layer, header)
    flipped = torch.cat([codes[:, :n_keys].flip(1), codes[:, n_keys:].flip(1)], 1)
    found = decode(other, other_header, pack_pages(flipped, other_header.bits, AT), AT)
    for one, expected in zip(found, decode(layer, header, pages, AT), strict=True):
        assert_near(one, expected)
    assert digest(*found) != GOLDEN["tokens"]


@pytest.mark.parametrize("pages", [0, 1, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_encoded_in_one_pass(pages: int, dtype: torch.dtype) -> None:
    layer = layer_of()
    header, x = header_of(layer), [part.to(dtype) for part in tokens_of(layer, pages)]
    found = encode_tokens(layer, header, (x[0], x[1]), AT)
    assert torch.equal(found, coded(layer, header, x)[1])
    wide = [torch.cat([part, part], 1)[:, : part.shape[1]] for part in x]
    assert torch.equal(found, encode_tokens(layer, header, (wide[0], wide[1]), AT))


def test_dimensions_without_bits_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    bits, x = header_of(layer).key.bits, drawn(45, 83, seed=1)
    whole, found = project(layer[0], x), project(layer[0], x, bits)
    assert torch.equal(found, torch.where(bits > 0, whole, 0))
    in_torch(monkeypatch)
    assert_near(project(layer[0], x, bits), found)


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_threads_change_no_bit(n_threads: int) -> None:
    layer = layer_of((192, 192), (192, 192))
    header, x = header_of(layer), tokens_of(layer, 70)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, n_threads):
            torch.set_num_threads(threads)
            z, pages = coded(layer, header, x)
            found.append(digest(*z, pages, *decode(layer, header, pages, AT)))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_pages_one_by_one_are_the_whole() -> None:
    layer = layer_of()
    header, x = header_of(layer), tokens_of(layer, 90)  # more than are decoded at a time
    z, pages = coded(layer, header, x)
    whole = decode(layer, header, pages, AT)
    for nth in range(0, 90, 17):
        rows, at = slice(nth * TOKENS, (nth + 1) * TOKENS), AT._replace(first=AT.first + nth)
        alone = coded(layer, header, [part[rows] for part in x])
        assert all(torch.equal(one, other[rows]) for one, other in zip(alone[0], z, strict=True))
        page = encode(layer, header, (z[0][rows].contiguous(), z[1][rows]), at)
        assert torch.equal(page[0], pages[nth])
        for one, other in zip(decode(layer, header, page, at), whole, strict=True):
            assert torch.equal(one, other[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_in_other_types_are_rounded(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    header = header_of(layer)
    pages = coded(layer, header, tokens_of(layer))[1]
    whole, found = decode(layer, header, pages, AT), decode(layer, header, pages, AT, dtype)
    assert all(torch.equal(one, other.to(dtype)) for one, other in zip(found, whole, strict=True))
    in_torch(monkeypatch)
    assert all(one.dtype == dtype for one in decode(layer, header, pages, AT, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_of_other_types_are_read(dtype: torch.dtype) -> None:
    layer = layer_of()
    x = drawn(45, 83, seed=1).to(dtype)
    assert torch.equal(project(layer[0], x), project(layer[0], x.float()))
    wide = drawn(45, 100, seed=1).to(dtype)[:, 5:88]
    assert torch.equal(project(layer[0], wide), project(layer[0], wide.float().contiguous()))


def test_every_dimension_may_have_its_own_levels() -> None:
    layer = layer_of()
    header = header_of(layer)
    pages = coded(layer, header, tokens_of(layer))[1]
    sides, chosen = [], []
    for side, part in zip(layer, header, strict=True):
        flat = torch.cat(side.levels)
        sets = (torch.arange(side.n_rows) % 2).int()
        levels = torch.stack([flat, flat + 1])
        coded_as = CodedDimensions(part.mean, part.scale, part.bits, levels, sets)
        sides.append(BackTransform(coded_as, side.mean, side.columns))
        chosen.append(part.mean + torch.where(part.bits > 0, part.scale * sets, 0.0))
    found = native.decode_pages((sides[0], sides[1]), pages, torch.float32)
    moved = LayerHeader(*[replace(part, mean=mean) for part, mean in zip(header, chosen, strict=True)])
    for one, other in zip(found, decode(layer, moved, pages, AT), strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("byte", [0, 7, 12, 16, 200])
def test_one_flipped_bit_is_found(byte: int) -> None:
    layer = layer_of()
    header = header_of(layer)
    pages = coded(layer, header, tokens_of(layer))[1]
    pages[1, byte] ^= 1
    with pytest.raises(DataError, match="page 3 is damaged"):
        decode(layer, header, pages, AT)


def test_nothing_is_nothing() -> None:
    layer = layer_of()
    header = header_of(layer)
    z, pages = coded(layer, header, [drawn(0, 83, seed=1), drawn(0, 48, seed=1)])
    assert [tuple(part.shape) for part in z] == [(0, 70), (0, 37)]
    assert len(pages) == 0
    assert [tuple(part.shape) for part in decode(layer, header, pages, AT)] == [(0, 83), (0, 48)]
    for part in header:
        part.bits.zero_()
    z, pages = coded(layer, header, tokens_of(layer, 1))
    keys, _ = decode(layer, header, pages, AT)
    assert pages.shape == (1, 16)
    assert_near(keys[0], layer[0].mean + header.key.mean @ layer[0].columns)
