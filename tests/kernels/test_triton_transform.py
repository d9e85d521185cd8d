"""Pages of the codec `transform` decoded in Triton against torch: on the GPU if there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DEVICE

# isort: split
from millpond.codec.transform.coding import decode, encode
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
