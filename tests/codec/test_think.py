"""ThinK with ratios in the name: what is dropped of keys and values, at which head_dim, and the bytes that it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool_set import PoolSet
from millpond.cache.serialization import _check_channels
from millpond.codec import resolve
from millpond.codec.channels import channel_scores, kept_channels, value_channel_scores
from millpond.codec.spec import Codec
from millpond.errors import DataError, OptionError
from millpond.methods import METHODS
from tests.helpers.codec.layers import DIM, HEADS, KV, OUTPUTS, check, feed, make, parts, tokens


def named(name: str) -> Codec:
    codec = resolve(name)
    assert isinstance(codec, Codec)
    return codec


@pytest.mark.parametrize(
    ("name", "keys", "values", "text"),
    [
        ("think:0.5", 0.5, 0.0, "think:0.5"),
        ("think:.25:0.50", 0.25, 0.5, "think:0.25:0.5"),
        ("think:0:0.3", 0.0, 0.3, "think:0:0.3"),
        ("think_kivi2:0.5", 0.5, 0.0, "think_kivi2:0.5"),
    ],
)
def test_ratios_in_the_name(name: str, keys: float, values: float, text: str) -> None:
    codec = named(name)
    assert (codec.prune, codec.prune_values, codec.name) == (keys, values, text)
    assert named(text) == codec
    by_layer: Any = resolve(f"0=bf16,*={name}")
    assert by_layer.of(1) == codec


@pytest.mark.parametrize(
    "name",
    ["think:1", "think:0", "think:-0.5", "think:nan", "think:0.5:0.2:0.1", "think:", "think:1e-3", "think:0.5:1.0"],
)
def test_what_is_no_ratio(name: str) -> None:
    with pytest.raises(OptionError, match=r"share|drops no channel"):
        resolve(name)


@pytest.mark.parametrize("name", ["int4:0.5", "bf16:20%,think:0.5", "kivi2:0.5", "bf16+think:0.5"])
def test_ratios_are_of_think_alone(name: str) -> None:
    with pytest.raises(OptionError):
        resolve(name)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_half_of_the_keys_is_a_quarter_of_the_bytes(dim: int) -> None:
    pools = PoolSet(named("think:0.5"), 16, MemoryLimit(None), masses=False)
    (pool,) = pools.packed(0, dim, dim, torch.device("cpu"))
    assert pool.kv_bytes_per_page == 0.75 * 2 * 2 * dim * pool.slots
    pools = PoolSet(named("think:0.5:0.5"), 16, MemoryLimit(None), masses=False)
    (pool,) = pools.packed(0, dim, dim, torch.device("cpu"))
    assert pool.kv_bytes_per_page == 0.5 * 2 * 2 * dim * pool.slots


@pytest.mark.parametrize(("name", "side"), [("think:0.4", "key"), ("think:0.5:0.4", "value")])
def test_a_ratio_that_drops_nothing_is_refused(name: str, side: str) -> None:
    pools = PoolSet(named(name), 16, MemoryLimit(None), masses=False)
    with pytest.raises(OptionError, match=rf"{side} channels in multiples of 16.*head_dim=32"):
        pools.packed(0, 32, 32, torch.device("cpu"))


@pytest.mark.parametrize(("name", "dim", "kept"), [("think_kivi2:0.5:0.5", 32, 16), ("think_kivi2:0:0.25", 64, 48)])
def test_channels_that_groups_do_not_divide_are_refused(name: str, dim: int, kept: int) -> None:
    pools = PoolSet(named(name), 16, MemoryLimit(None), masses=False)
    with pytest.raises(OptionError, match=f"leaves {kept} of {dim} value channels.*groups of 32; give a ratio"):
        pools.packed(0, dim, dim, torch.device("cpu"))


def test_value_channels_are_dropped_on_a_cpu_alone() -> None:
    pools = PoolSet(named("think:0.5:0.3"), 16, MemoryLimit(None), masses=False)
    with pytest.raises(OptionError, match=r"CPU alone.*'think:0.5'"):
        pools.packed(0, 64, 64, torch.device("meta"))


def test_score_of_value_channels() -> None:
    """A channel counts by what the newest queries read in it, times its row of the output projection."""
    generator = torch.Generator().manual_seed(0)
    a, v = torch.rand(HEADS, 8, 20, generator=generator), torch.randn(KV, 20, DIM, generator=generator)
    outputs = a @ v.repeat_interleave(HEADS // KV, 0)
    norms = OUTPUTS.norm(dim=2)
    expected = torch.zeros(KV, DIM)
    for head in range(HEADS):
        for j in range(DIM):
            part = (a[head] @ v[head // (HEADS // KV), :, j])[:, None] * OUTPUTS[head, j][None]  # (8, hidden)
            expected[head // (HEADS // KV), j] += part.square().sum() / (HEADS // KV)
    assert torch.allclose(value_channel_scores(outputs, norms, KV), expected, rtol=1e-4)


@pytest.mark.parametrize(("chunk", "kernels"), [(200, "auto"), (23, "auto"), (200, "reference")])
def test_value_channels_are_those_of_the_whole_prompt(
    chunk: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channels that the formula names are dropped, the same ones whatever the chunks, and read as zero."""
    monkeypatch.setenv("MILLPOND_KERNELS", kernels)
    q, k, v = tokens(200)
    cache = make("think:0.5:0.25", between_chunks=False)
    outs = [feed(cache, (q, k, v), begin, min(begin + chunk, 200)) for begin in range(0, 200, chunk)]
    feed(cache, tokens(201, seed=9), 200, 201)
    out = torch.cat(outs, 2)[0, :, -32:]
    values = kept_channels(value_channel_scores(out, OUTPUTS.norm(dim=2), KV), 0.25)
    keys = kept_channels(channel_scores(q[0, :, -32:], k[0]), 0.5)
    regions = parts(cache)[1].regions()
    assert regions.value_channels is not None
    assert regions.channels is not None
    assert regions.value_channels.tolist() == values.tolist()
    assert regions.channels.tolist() == keys.tolist()
    assert regions.pages.layout.value_dim == 48
    found = cache.read(0)
    kept = torch.zeros(KV, DIM).scatter(1, values.long(), 1.0).bool()
    stored = found.values[:, :160].transpose(1, 2)
    assert (stored[~kept] == 0).all()
    assert torch.equal(stored[kept], v[0].bfloat16().float()[:, :160].transpose(1, 2)[kept])
    check(cache)


def test_more_value_channels_are_nearer_to_all() -> None:
    """Dropping the least by the formula loses less than dropping as many of the largest."""
    q, k, v = tokens(200)
    v = v * torch.linspace(0.05, 3, DIM)  # channels of other sizes
    errors = {}
    for codec in ("bf16", "think:0:0.25", "think:0:0.5"):
        cache = make(codec)
        feed(cache, (q, k, v), 0, 200)
        errors[codec] = feed(cache, tokens(201, seed=9), 200, 201)[0, :, 0]
    lost = [
        float(torch.einsum("hd,hdo->ho", errors[name] - errors["bf16"], OUTPUTS).norm())
        for name in ("think:0:0.25", "think:0:0.5")
    ]
    assert 0 < lost[0] < lost[1]


def test_greedy_prompts_have_no_value_channels() -> None:
    with pytest.raises(OptionError, match=r"value channels.*prefill='once'"):
        METHODS.get("h2o")(prefill="greedy").check_codec(named("think:0.5:0.3"))


def test_channels_of_a_file_are_checked() -> None:
    """Channels out of order or out of range would be written beyond their row."""
    right = torch.tensor([[0, 3, 5]], dtype=torch.int32)
    for wrong in ([[3, 0, 5]], [[0, 3, 3]], [[0, 3, 8]], [[-1, 3, 5]]):
        numbers = {"value_channels": torch.tensor(wrong, dtype=torch.int32)}
        with pytest.raises(DataError, match=r"value_channels"):
            _check_channels(0, numbers, {"value_channels": right}, {"value_channels": 8})
    _check_channels(0, {"value_channels": right}, {"value_channels": right}, {"value_channels": 8})
