"""Pages of the codec `transform` decoded in Triton against torch: on the GPU if there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DEVICE

# isort: split
from millpond.codec.transform.coding import decode, encode, encode_tokens, project
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader
from millpond.errors import DataError
from tests.helpers.codec.transform import AT, drawn, header_of, layer_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key", "value"), [((70, 83), (37, 48)), ((3, 200), (1, 16))])
def test_tokens_are_those_of_torch(
    key: tuple[int, int], value: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(key, value)
    header = header_of(layer)
    monkeypatch.setenv("MILLPOND_KERNELS", "reference")
    z = (drawn(64, key[0], seed=1), drawn(64, value[0], seed=2))
    pages = encode(layer, header, z, AT)
    expected = decode(layer, header, pages, AT, dtype)
    there = (layer[0].to(DEVICE), layer[1].to(DEVICE))
    header = LayerHeader(*[SideHeader(*(t.to(DEVICE) for t in (p.mean, p.scale, p.bits))) for p in header])
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")
    found = decode(there, header, pages, AT, dtype)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        tolerance = (1e-5 if dtype == torch.float32 else 1e-2) * float(other.abs().max())
        torch.testing.assert_close(one.cpu().float(), other.float(), rtol=0, atol=tolerance)
    pages[1, 20] ^= 1
    with pytest.raises(DataError, match="is damaged"):
        decode(there, header, pages, AT, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key", "value"), [((70, 83), (37, 48)), ((3, 200), (1, 16))])
def test_codes_are_those_of_torch(
    key: tuple[int, int], value: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers have equal codes; of tokens a sum that rounds otherwise moves a number over a cut, which is rare."""
    layer = layer_of(key, value)
    header = header_of(layer)
    z = (drawn(64, key[0], seed=1), drawn(64, value[0], seed=2))
    tokens = tuple(drawn(64, d, seed=n).to(dtype) for n, (_, d) in enumerate((key, value)))
    monkeypatch.setenv("MILLPOND_KERNELS", "reference")
    pages, of_tokens = encode(layer, header, z, AT), encode_tokens(layer, header, tokens, AT)
    expected = [project(side, x) for side, x in zip(layer, tokens, strict=True)]
    there = (layer[0].to(DEVICE), layer[1].to(DEVICE))
    header = LayerHeader(*[SideHeader(*(t.to(DEVICE) for t in (p.mean, p.scale, p.bits))) for p in header])
    monkeypatch.setenv("MILLPOND_KERNELS", "gpu")
    assert torch.equal(encode(there, header, (z[0].to(DEVICE), z[1].to(DEVICE)), AT), pages)
    tokens = tuple(x.to(DEVICE) for x in tokens)
    found = encode_tokens(there, header, tokens, AT)
    assert found.shape == of_tokens.shape
    assert float((found[:, 16:] == of_tokens[:, 16:]).float().mean()) > 0.99
    for side, part, x, known in zip(there, header, tokens, expected, strict=True):
        tolerance = 1e-5 * float(known.abs().max())
        torch.testing.assert_close(project(side, x).cpu(), known, rtol=0, atol=tolerance)
        some = project(side, x, part.bits).cpu()
        torch.testing.assert_close(some[:, part.bits.cpu() > 0], known[:, part.bits.cpu() > 0], rtol=0, atol=tolerance)
        assert not some[:, part.bits.cpu() == 0].any()
