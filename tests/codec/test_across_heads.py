"""KVQuant as its paper has it: value ranges and outliers of a token over all KV heads, compared with plain loops."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from millpond.codec import Codec, codec_named
from millpond.codec.calibration import load_calibration
from millpond.codec.nuq import normalised_token_values
from millpond.errors import OptionError
from millpond.kernels.packed import codes
from millpond.kernels.packed.across_heads import encode_across, outer
from millpond.kernels.packed.layout import ROOM, outer_count, table_of
from millpond.methods import METHODS
from tests.helpers.codec.known import calibration
from tests.helpers.codec.layers import DIM, KV, check, decode, feed, make, parts, tokens

SLOTS, BITS = 32, (2, 3, 4)


def paper(bits: int) -> Codec:
    return calibration(KV, DIM).applied(codec_named(f"kvquant{bits}_paper"))


def values(seed: int = 0) -> Tensor:
    """Two pages of two heads, (4, slots, dim): pages of one token's heads follow one another."""
    x = torch.randn(2 * KV, SLOTS, DIM, generator=torch.Generator().manual_seed(seed))
    x[0::2] *= 0.3  # a head of small values, whose numbers the token's range makes coarse
    return x


def by_token(x: Tensor, page: int, slot: int) -> np.ndarray:
    return np.concatenate([x[page * KV + head, slot].double().numpy() for head in range(KV)])


@pytest.mark.parametrize("bits", BITS)
def test_values_as_the_paper_has_them(bits: int) -> None:
    """Every token: the largest and smallest 0.5 % are outliers and exact, the others the nearest of the table."""
    codec = paper(bits)
    layout = codec.layout(DIM, DIM, tables=calibration(KV, DIM).tables(0, codec))
    side, x = layout.value, values()
    read = codes.decode(encode_across(x, side, None, KV), side)
    table, n = table_of(side).double().numpy(), math.ceil(0.005 * KV * DIM)
    for page in range(2):
        for slot in range(SLOTS):
            token, found = by_token(x, page, slot), by_token(read, page, slot)
            order = token.argsort()
            outliers = np.concatenate([order[:n], order[-n:]])
            inliers = order[n:-n]
            low, high = token[inliers].min(), token[inliers].max()
            zero, scale = (float(np.float16(t)) for t in ((high + low) / 2, (high - low) / 2))
            nearest = table[np.abs((token[:, None] - zero) / scale - table).argmin(1)] * scale + zero
            assert np.abs(found - token)[outliers].max() < 2e-3  # a remainder in float16
            exact = np.abs(found - token) < 2e-3
            assert (exact | (np.abs(found - nearest) < 1e-5)).all()


def test_keys_have_the_outliers_of_a_token() -> None:
    """Those beyond the calibrated range, at most 0.5 % on each side of a token, are exact."""
    codec = paper(3)
    ranges = calibration(KV, DIM).key_range(0)
    fixed = tuple(t.repeat(2, 1)[:, None] for t in ranges)
    scale, zero = fixed
    side = codec.layout(DIM, DIM, tables=calibration(KV, DIM).tables(0, codec)).key
    x = values(1) * 1.4 * scale + zero
    encoded = encode_across(x, side, (scale, zero), KV)
    read, y = codes.decode(encoded, side, (scale, zero)), (x - zero) / scale
    n, exact = math.ceil(0.005 * KV * DIM), 0
    for page in range(2):
        for slot in range(SLOTS):
            token, found, wide = by_token(y, page, slot), by_token(read, page, slot), by_token(x, page, slot)
            order = token.argsort()
            for at in (*order[:n], *order[-n:]):
                if abs(token[at]) > 1:
                    assert abs(found[at] - wide[at]) < 2e-2
                    exact += 1
    assert exact > 2 * SLOTS
    assert encoded.where is not None
    assert encoded.where.shape == (2 * KV, 2 * n * SLOTS * ROOM // KV)


def test_a_head_with_more_outliers_than_places_is_clipped() -> None:
    """Those farthest out are exact, and no number is read beyond the range and the outliers."""
    codec = paper(4)
    side = codec.layout(DIM, DIM, tables=calibration(KV, DIM).tables(0, codec)).value
    x = torch.randn(KV, SLOTS, DIM, generator=torch.Generator().manual_seed(2))
    x[0] = 40 * torch.randn(SLOTS, DIM, generator=torch.Generator().manual_seed(3))  # all outliers lie in one head
    side = dataclasses.replace(side, n_extra=16)
    read = codes.decode(encode_across(x, side, None, KV), side)
    assert bool(torch.isfinite(read).all())
    assert int(((read[0] - x[0]).abs() < 2e-2).sum()) >= 16


def test_the_share_is_rounded_up_as_published() -> None:
    assert [outer_count(0.01, n) for n in (4096, 192, 64)] == [21, 1, 1]
    assert outer_count(0.0, 4096) == 0
    assert int(outer(torch.randn(1, 192), 3).sum()) == 6
    assert not outer(torch.randn(1, 64), 0).any()


def test_tables_are_of_numbers_in_the_range_of_their_token() -> None:
    x = values().view(2, KV, SLOTS, DIM).transpose(1, 2).reshape(-1, KV * DIM)
    y, weights = normalised_token_values(x, None, 0.01)
    n = x.shape[0] * (x.shape[1] - 2 * math.ceil(0.005 * x.shape[1]))
    assert len(y) == len(weights) == n
    assert float(y.abs().max()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_its_bytes(bits: int) -> None:
    """Twice the places for outliers of the plain format; each head stores the range of its tokens."""
    plain, own = (codec_named(name).bits_per_element(128, 128) for name in (f"kvquant{bits}", f"kvquant{bits}_paper"))
    assert own - plain == pytest.approx(0.43, abs=0.02)  # of 8 heads; 12 of 1,024 numbers are outliers


def test_pages_of_a_cache_are_those_of_the_formula() -> None:
    """Two sequences of other lengths, in a prompt and while decoding."""
    qkv, cache = tokens(400, batch=2), make("kvquant4_paper")
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[1, :37] = False
    feed(cache, qkv, 0, 300, mask=mask)
    table, quantized = parts(cache)
    assert quantized.lens.min() >= 224
    for sequence, first in ((0, 0), (1, 37)):
        found = quantized.read(sequence)
        n = int(quantized.lens[quantized.rows(sequence)][0]) // SLOTS * SLOTS
        at = found.positions[0, :n].long() + first
        x = qkv[2][sequence][:, at].bfloat16().float().view(KV, -1, SLOTS, DIM).transpose(0, 1).flatten(0, 1)
        side = quantized.pool.arrays.layout.value
        expected = codes.decode(encode_across(x, side, None, KV), side).view(-1, KV, SLOTS, DIM)
        assert torch.equal(found.values[:, :n], expected.transpose(0, 1).flatten(1, 2))
    decode(cache, qkv, 300, 400)
    check(cache)
    assert table.lengths().max() < 2 * SLOTS + 2


@pytest.mark.parametrize("method", ["h2o", "snapkv", "ada"])
def test_methods_that_keep_tokens_in_some_heads_are_refused(method: str) -> None:
    with pytest.raises(OptionError, match=r"kvquant3_paper.*in some heads alone.*'full', or kvquant3"):
        METHODS.get(method)().check_codec(paper(3))
    METHODS.get("full")().check_codec(paper(3))


def test_a_calibration_from_before_is_told(tmp_path: Path) -> None:
    old = calibration(KV, DIM)
    layers = tuple(dataclasses.replace(layer, token_values={}) for layer in old.layers)
    path = tmp_path / "old.safetensors"
    dataclasses.replace(old, layers=layers).save(path)
    loaded = load_calibration(path)
    assert loaded.applied(codec_named("kvquant3")).calibration is loaded
    with pytest.raises(OptionError, match="make it again with 'millpond calibrate'"):
        loaded.applied(codec_named("kvquant3_paper"))
    old.save(path)
    assert load_calibration(path).layers[0].token_values == old.layers[0].token_values
    assert load_calibration(path).digest() == old.digest() != loaded.digest()


@pytest.mark.parametrize("bits", BITS)
def test_each_form_has_tables_of_its_own(bits: int) -> None:
    known = calibration(KV, DIM)
    plain, own = (known.tables(0, codec_named(f"kvquant{bits}{end}")) for end in ("", "_paper"))
    assert plain.key == own.key
    assert plain.value == known.layers[0].values[bits].table
    assert own.value == known.layers[0].token_values[bits].table
    assert own.value != plain.value
    assert own.n_kv_heads == KV
