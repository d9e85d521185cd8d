"""Codes of a request are the same whatever runs with it, in every number format."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import millpond as mp
from millpond.codec.presets import PRESETS
from millpond.codec.rotate import hadamard, rotate
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.errors import MillpondError
from millpond.kernels import native
from tests.engine.test_mixed_formats import options

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason="needs the native kernels"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

#: All formats that need no calibration, and those of layers and ages of their own.
CODECS = [name for name, codec in PRESETS.items() if not codec.calibrated] + ["0=bf16,1=int4", "bf16:20,kivi4:50,kivi2"]
LENGTHS = (150, 33, 211, 97)


@cache
def model(dtype: torch.dtype, head_dim: int = 64) -> Any:
    """Wide weights, so that a code that differs by one is seen in the log probabilities."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        attn_implementation="sdpa",
        eos_token_id=None,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


def ids(length: int) -> list[int]:
    return torch.randint(2, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def logprobs(codec: str, method: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> list[Any]:
    """Of the first of several requests that run together, under `deterministic`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=UserWarning)
        head_dim = 32 if "rotated" in codec else 64  # how libraries multiply narrow rows depends on their number
        engine = Engine(model(dtype, head_dim), method="full", deterministic=True)
        params = mp.SamplingParams(max_tokens=40, temperature=0, logprobs=2, ignore_eos=True)
        for length in lengths:
            name, cache_options = str(length), options(method, codec)
            engine.add(Request(request_id=name, prompt=tuple(ids(length)), params=params, cache=cache_options))
        done = {output.request_id: output for output in engine.drain()}
        engine.close()
    found = done[str(lengths[0])]
    assert found.error is None
    return list(found.completions[0].logprobs or ())


@pytest.mark.covering
@pytest.mark.parametrize("method", ["full", "h2o"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["f32", "bf16"]
)
def test_bits_stay_beside_others(dtype: torch.dtype, codec: str, method: str) -> None:
    try:
        expected = logprobs(codec, method, dtype, LENGTHS[:1])
    except MillpondError as error:
        pytest.skip(str(error))  # a format that this method does not take
    assert logprobs(codec, method, dtype, LENGTHS[:2]) == expected
    assert logprobs(codec, method, dtype, LENGTHS) == expected


def codes(codec: str, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """What the packed pages of the first of some texts read as, which `generate` reads padded on the left."""
    width = max(lengths)
    tokens, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width).long()
    for row, length in enumerate(lengths):
        tokens[row, width - length :], mask[row, width - length :] = torch.tensor(ids(length)), 1
    with mp.compress(model(torch.float32), "full", None, codec) as kept, torch.no_grad():
        model(torch.float32).generate(tokens, attention_mask=mask, past_key_values=kept, max_new_tokens=1)
        found = []
        for layer in kept.layers:
            table = layer.layer_cache.table
            for part in table.packed_parts:
                read = part.read(0)
                found += [read.keys[:, : int(part.lens[0])], read.positions[:, : int(part.lens[0])].float()]
    return found


@pytest.mark.parametrize("codec", ["int4", "flexgen4", "rotated4", "kivi2", "fp8"])
def test_padding_reaches_no_code(codec: str) -> None:
    """Codes differ by a step at most, where rounding of a wider product tips one; a pad would change a whole range."""
    for alone, beside in zip(codes(codec, LENGTHS[:1]), codes(codec, LENGTHS), strict=True):
        assert alone.shape == beside.shape
        different = ~torch.isclose(alone, beside, rtol=1e-3, atol=1e-4)
        assert int(different.sum()) <= 0.001 * different.numel()


def test_a_row_is_rotated_to_the_same_bits_whatever_is_beside_it() -> None:
    for dim in (32, 64, 80, 96, 128):
        x = torch.randn(7, 3, dim, generator=torch.Generator().manual_seed(dim))
        found = rotate(x)
        torch.testing.assert_close(found, x @ hadamard(dim))
        for row in range(7):
            assert torch.equal(rotate(x[row : row + 1]), found[row : row + 1])
            assert torch.equal(rotate(x[row, 1]), found[row, 1])
